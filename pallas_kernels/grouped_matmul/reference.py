"""Definition of grouped products in plain `jax.numpy`; also runs where there is no kernel (CPU).

Called by `api.py`, which has checked the arguments, and by the tests of the kernels. Shares no code
with any kernel.

The rows are cut into blocks of `BLOCK_ROWS` that never cross a group, and a loop runs over the
non-empty blocks. The time is thus proportional to the rows, not the groups, and the weights of a
group are read once per `BLOCK_ROWS` of its rows. On CPU, at decode sizes, this is 2 to 10 times
faster than `jax.lax.ragged_dot` or than multiplying all rows by all groups. A single row would cost
less by itself, as XLA packs no weights for it, but its sums would then depend on how many other
rows its group has, and tokens on what else is in a batch.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from pallas_kernels.quantize.bits import as_bits
from pallas_kernels.quantize.product import (
    product_of_rows,
    quant_product,
    quant_product_of_blocks,
    quant_product_of_floats,
)
from pallas_kernels.quantize.quant_array import QuantArray
from pallas_kernels.varying import vary_like

BLOCK_ROWS = 8

WeightArray = Array | QuantArray


def grouped_matmul(
    rows: Float[Array, "rows d_in"],
    weights: Float[Array, "groups d_out d_in"] | QuantArray,
    group_sizes: Int32[Array | np.ndarray, " groups"],
    row_format: str | None = None,
) -> Float[Array, "rows d_out"]:
    """Multiply every row by the weights of its group."""

    def product(block: Array, weights: WeightArray) -> Array:
        return _matmul(block, weights, row_format).astype(rows.dtype)

    return _map_blocks(product, rows, (weights,), group_sizes)


def grouped_swiglu(
    rows: Float[Array, "rows d_model"],
    gate_weights: Float[Array, "groups d_ff d_model"] | QuantArray,
    up_weights: Float[Array, "groups d_ff d_model"] | QuantArray,
    down_weights: Float[Array, "groups d_out d_ff"] | QuantArray,
    group_sizes: Int32[Array | np.ndarray, " groups"],
    row_format: str | None = None,
    source: Int32[Array, " picked"] | None = None,
) -> Float[Array, "picked d_out"]:
    """Run every row through the SwiGLU network of its group."""

    def swiglu(block: Array, gate: WeightArray, up: WeightArray, down: WeightArray) -> Array:
        hidden = jax.nn.silu(_matmul(block, gate, row_format)) * _matmul(block, up, row_format)
        if row_format in (None, "float"):
            hidden = hidden.astype(rows.dtype)
        return _matmul(hidden, down, row_format).astype(rows.dtype)

    picked = rows if source is None else rows[source]
    return _map_blocks(swiglu, picked, (gate_weights, up_weights, down_weights), group_sizes)


def _matmul(left: Array, right: WeightArray, row_format: str | None) -> Array:
    """Rows times a group's weights [d_out, d_in], FP32; for INT8 every row is quantised, too."""
    if not isinstance(right, QuantArray):
        return product_of_rows(left, right, precision=jax.lax.Precision.HIGHEST)
    if row_format is None:
        return quant_product(left, right)
    product = quant_product_of_floats if row_format == "float" else quant_product_of_blocks
    return product(left, right)


def _map_blocks(
    function: Callable[..., Array],
    rows: Array,
    weights: tuple[WeightArray, ...],
    sizes: Array | np.ndarray,
) -> Array:
    """Apply `function(block of rows, *weights of its group)` to all rows that belong to a group."""
    count, group_sizes = rows.shape[0], jnp.asarray(sizes)
    weights = jax.tree.map(as_bits, weights)  # of which one group's are sliced
    row_end = jnp.cumsum(group_sizes)  # [groups]: where a group's rows end
    row_start = row_end - group_sizes
    blocks_of_group = -(-group_sizes // BLOCK_ROWS)
    block_end = jnp.cumsum(blocks_of_group)  # [groups]: where a group's blocks end
    block_start = block_end - blocks_of_group
    # The last block may reach past the last row.
    padded_rows = jnp.pad(rows, ((0, BLOCK_ROWS), (0, 0)))

    def run_block(index: Array, output: Array) -> Array:
        group = jnp.sum(block_end <= index)
        start = row_start[group] + (index - block_start[group]) * BLOCK_ROWS
        block = jax.lax.dynamic_slice_in_dim(padded_rows, start, BLOCK_ROWS)
        result = function(block, *jax.tree.map(lambda stack: stack[group], weights))
        # A block that reaches into the next group must leave that group's rows alone.
        owned = start + jnp.arange(BLOCK_ROWS) < row_end[group]
        before = jax.lax.dynamic_slice_in_dim(output, start, BLOCK_ROWS)
        result = jnp.where(owned[:, None], result, before)
        return jax.lax.dynamic_update_slice_in_dim(output, result, start, axis=0)

    output = jnp.zeros((count + BLOCK_ROWS, weights[-1].shape[-2]), rows.dtype)
    output = vary_like(output, (rows, *jax.tree.leaves(weights), group_sizes))
    return jax.lax.fori_loop(0, block_end[-1], run_block, output)[:count]
