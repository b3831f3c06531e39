"""Rows of a table by number, such as embeddings of tokens. Called by serving blocks; plain XLA."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.target import current_target

LANES = 128
"""Columns of a tile of a TPU's memory."""


def rows_of(
    table: Float[Array, "rows columns"], numbers: Int[Array, " wanted"]
) -> Float[Array, "wanted columns"]:
    """Returns rows of a table by their numbers. XLA:TPU keeps a table column by column if its width
    is no multiple of 128 (gpt-oss has 2,880 columns), and would lay all of it out anew to gather
    rows: 1.2 GB read and written in each step. There every row comes out of a block of 128 rows,
    unless these blocks together are as large as the table."""
    count, width = table.shape
    whole = width % LANES == 0 or len(numbers) * LANES >= count
    if whole or current_target().backend != "mosaic_tpu":
        return table[numbers]
    return from_blocks(table, numbers)


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
