"""Looks up rows of embeddings, and gathers columns of embeddings and logits that `tp` devices
divide. Called by `blocks.py`, the sampler and the programs.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LANES = 128
"""Columns of a tile of a TPU's memory."""


def all_columns(own: Float[Array, "rows own"], count: int) -> Float[Array, "rows count"]:
    """Gathers the columns of all `tp` devices, and drops the padding behind them. Returns the input
    where it already has `count` columns. XLA:CPU lays out a gather along columns column by column:
    to gather [devices, rows, columns] saves two transpositions."""
    if own.shape[1] == count:
        return own

    def by_rows(own: Array) -> Array:
        parts = jax.lax.all_gather(own, "tp")
        return jnp.swapaxes(parts, 0, 1).reshape(own.shape[0], -1)

    along = functools.partial(jax.lax.all_gather, axis_name="tp", axis=1, tiled=True)
    every: Array = jax.lax.platform_dependent(own, cpu=by_rows, default=along)
    return every[:, :count]


def rows_of(
    table: Float[Array, "rows columns"], numbers: Int[Array, " wanted"]
) -> Float[Array, "wanted columns"]:
    """Returns rows of a table by their numbers. XLA:TPU keeps a table column by column if its width
    is no multiple of 128 (gpt-oss has 2,880 columns), and would lay all of it out anew to gather
    rows: 1.2 GB read and written in each step. There every row comes out of a block of 128 rows,
    unless these blocks together are as large as the table."""
    count, width = table.shape
    if width % LANES == 0 or len(numbers) * LANES >= count:
        return table[numbers]
    found: Array = jax.lax.platform_dependent(
        table, numbers, tpu=from_blocks, default=lambda table, numbers: table[numbers]
    )
    return found


def from_blocks(
    table: Float[Array, "rows columns"], numbers: Int[Array, " wanted"]
) -> Float[Array, "wanted columns"]:
    """Returns rows of a table of at least 128 rows, each summed from a masked block. A product with
    a mask would have XLA:TPU copy the table into other tiles."""

    def row(number: Array) -> Array:
        start = jnp.clip(number // LANES * LANES, 0, len(table) - LANES)
        block = jax.lax.dynamic_slice_in_dim(table, start, LANES)
        wanted = jnp.arange(LANES) == number - start
        return jnp.sum(jnp.where(wanted[:, None], block, 0), axis=0)

    return jax.lax.map(row, numbers)
