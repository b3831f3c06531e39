"""Gathers columns of embeddings and logits that `tp` devices divide. Called by `blocks.py`, the
sampler and the programs.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.target import by_platform


def all_columns(own: Float[Array, "rows own"], count: int) -> Float[Array, "rows count"]:
    """Gathers the columns of all `tp` devices, and drops the padding behind them. Returns the input
    where it already has `count` columns. XLA:CPU lays out a gather along columns column by column:
    to gather [devices, rows, columns] saves two transpositions."""
    if own.shape[1] == count:
        return own

    def by_rows(own: Array) -> Array:
        return jnp.swapaxes(jax.lax.all_gather(own, "tp"), 0, 1).reshape(own.shape[0], -1)

    along = functools.partial(jax.lax.all_gather, axis_name="tp", axis=1, tiled=True)
    every: Array = by_platform(own, cpu=by_rows, default=along)
    return every[:, :count]
