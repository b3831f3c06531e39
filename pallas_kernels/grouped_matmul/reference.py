"""Definition of grouped products in plain `jax.numpy`; runs on devices without a kernel (CPU).

Called by `api.py`, which has checked the arguments, and by the tests of the kernels. Shares no code
with any kernel.

A row's result must not depend on other rows of its group, or tokens would depend on the rest of
their batch. XLA sums rows in an order that depends on their number, so weights are multiplied by
blocks of `BLOCK_ROWS` rows, some of which may not exist. Matrices that lie input by input take
blocks of any size. A block never crosses a group, however few rows that has.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from pallas_kernels.activation import SWIGLU, Activation
from pallas_kernels.grouped_matmul.tiles import RowFormat
from pallas_kernels.input_major import InputMajor
from pallas_kernels.input_major import product as input_major_product
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
_BLOCKS = ((2, 1), (4, 4), (BLOCK_ROWS, 2 * BLOCK_ROWS))
"""Rows of a block, and the average rows of a group below which blocks have that size."""

WeightArray = Array | QuantArray | InputMajor


class GroupedCall(NamedTuple):
    """A call of `api.grouped_matmul`, with one stack of weights, or of `api.grouped_swiglu`, with
    gate, up and down, that has been checked. `api.py` explains the fields."""

    rows: Float[Array, "rows d_in"]
    weights: tuple[Any, ...]
    """Arrays, `QuantArray`s, on CPUs `InputMajor`s, for TPU kernels `Words`."""
    group_sizes: Int32[Array | np.ndarray, " groups"]
    row_format: RowFormat | None
    narrow: QuantArray | None
    source: Int32[Array, " picked"] | None = None
    zero_padding: bool = True
    average: int | None = None
    activation: Activation = SWIGLU
    biases: tuple[Array, Array, Array] | None = None
    first: Int32[Array, ""] | None = None
    """Only for kernels that begin at this group of the weights by themselves."""


def grouped_matmul(call: GroupedCall) -> Float[Array, "rows d_out"]:
    """Multiplies every row by the weights of its group."""

    def product(some: Array, weights: WeightArray) -> Array:
        return _matmul(some, weights, call.row_format).astype(call.rows.dtype)

    return _map_rows(product, call.rows, call.weights, call.group_sizes)


def grouped_swiglu(call: GroupedCall) -> Float[Array, "picked d_out"]:
    """Runs every row through the SwiGLU network of its group; `average` affects speed alone."""
    dtype, row_format = call.rows.dtype, call.row_format

    def swiglu(some: Array, *weights: Any) -> Array:
        *own, gate, up, down = weights
        products = _matmul(some, gate, row_format), _matmul(some, up, row_format)
        if own:
            products = products[0] + own[0], products[1] + own[1]
        hidden = gated(*products, call.activation)
        if row_format in (None, "float"):
            hidden = hidden.astype(dtype)
        out = _matmul(hidden, down, row_format)
        return (out + own[2] if own else out).astype(dtype)

    added = [bias[:, None].astype(jnp.float32) for bias in call.biases or ()]
    weights = *added, *call.weights
    return _map_rows(
        swiglu, call.rows, weights, call.group_sizes, call.average, call.source, call.zero_padding
    )


def gated(gate: Array, up: Array, activation: Activation = SWIGLU) -> Array:
    """Returns the activation of the two products."""
    limit, before = activation.limit, activation.clamp == "before"
    if limit:
        gate, up = jnp.minimum(gate, limit) if before else gate, jnp.clip(up, -limit, limit)
    opened = gate * jax.nn.sigmoid(activation.alpha * gate)
    if limit and not before:
        opened = jnp.minimum(opened, limit)
    return opened * (up + activation.plus if activation.plus else up)


def _matmul(left: Array, right: WeightArray, row_format: str | None) -> Array:
    """Multiplies rows by a group's weights [d_out, d_in], in FP32; INT8 quantises every row."""
    if isinstance(right, InputMajor):
        return input_major_product(left, right)
    if not isinstance(right, QuantArray):
        left = left.astype(right.dtype)
        return product_of_rows(left, right, precision=jax.lax.Precision.HIGHEST)
    if row_format is None:
        return quant_product(left, right)
    product = quant_product_of_floats if row_format == "float" else quant_product_of_blocks
    return product(left, right)


def _map_rows(
    function: Callable[..., Array],
    rows: Array,
    weights: tuple[WeightArray, ...],
    sizes: Array | np.ndarray,
    average: int | None = None,
    source: Array | None = None,
    zero_padding: bool = True,
) -> Array:
    """Applies `function(block of rows, *weights of its group)` to all rows that belong to a group.

    Args:
      source: index into `rows` for every row of the groups; None: `rows` in order.
      zero_padding: whether rows of no group have to be zero.
    """
    count, group_sizes = rows.shape[0] if source is None else source.shape[0], jnp.asarray(sizes)
    tiled = any(isinstance(stack, InputMajor) for stack in weights)
    block_rows = _block_of(count, average) if tiled else BLOCK_ROWS
    weights = jax.tree.map(as_bits, weights)  # bits are cheaper to slice
    row_end = jnp.cumsum(group_sizes)  # [groups]: where a group's rows end
    row_start = row_end - group_sizes
    blocks_of_group = -(-group_sizes // block_rows)
    block_end = jnp.cumsum(blocks_of_group)  # [groups]: where a group's blocks end
    block_start = block_end - blocks_of_group
    # The last block may reach past the last row.
    if source is None:
        padded_rows = jnp.pad(rows, ((0, block_rows), (0, 0)))
    else:
        padded_rows = rows[jnp.pad(source, (0, block_rows))]

    def run_rows(size: int, group: Array, start: Array, output: Array) -> Array:
        block = jax.lax.dynamic_slice_in_dim(output if in_place else padded_rows, start, size)
        result = function(block, *(_of_group(stack, group) for stack in weights))
        # A block that reaches into the next group must leave that group's rows alone.
        owned = start + jnp.arange(size) < row_end[group]
        before = jax.lax.dynamic_slice_in_dim(output, start, size)
        result = jnp.where(owned[:, None], result, before)
        return jax.lax.dynamic_update_slice_in_dim(output, result, start, axis=0)

    def run_block(index: Array, output: Array) -> Array:
        group = jnp.sum(block_end <= index)
        start = row_start[group] + (index - block_start[group]) * block_rows
        whole = functools.partial(run_rows, block_rows)
        if not tiled or block_rows < BLOCK_ROWS:
            return whole(group, start, output)
        # Half a block is enough where a group has no more rows left.
        half, left = functools.partial(run_rows, block_rows // 2), row_end[group] - start
        return jax.lax.cond(left > block_rows // 2, whole, half, group, start, output)

    shape = (count + block_rows, weights[-1].shape[-2])
    # Results take the place of their rows, which no later block reads.
    in_place = not zero_padding and shape == padded_rows.shape
    output = padded_rows if in_place else jnp.zeros(shape, rows.dtype)
    output = vary_like(output, (rows, *jax.tree.leaves(weights), group_sizes))
    return jax.lax.fori_loop(0, block_end[-1], run_block, output)[:count]


def _of_group(stack: WeightArray, group: Array) -> WeightArray:
    if isinstance(stack, InputMajor):  # its products find the group themselves
        return InputMajor(stack.values, group)
    return jax.tree.map(lambda array: array[group], stack)


def _block_of(count: int, average: int | None) -> int:
    """Returns the rows of a block for weights whose sums do not depend on it. Small blocks waste
    fewer products on missing rows; large blocks read the weights less often."""
    if average is None:
        return BLOCK_ROWS
    block = next((size for size, most in _BLOCKS if average < most), 4 * BLOCK_ROWS)
    return min(block, max(count, 1))
