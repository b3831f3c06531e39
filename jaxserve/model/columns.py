"""Columns of embeddings and logits, which `tp` devices divide. Called by `blocks.py`, the sampler
and the programs.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def all_columns(own: Float[Array, "rows own"], count: int) -> Float[Array, "rows count"]:
    """The columns of all `tp` devices without the padding behind them, or the same where these are
    all. XLA:CPU stores what it gathers along columns column after column: to gather [devices, rows,
    columns] saves two transpositions."""
    if own.shape[1] == count:
        return own

    def by_rows(own: Array) -> Array:
        parts = jax.lax.all_gather(own, "tp")
        return jnp.swapaxes(parts, 0, 1).reshape(own.shape[0], -1)

    along = functools.partial(jax.lax.all_gather, axis_name="tp", axis=1, tiled=True)
    every: Array = jax.lax.platform_dependent(own, cpu=by_rows, default=along)
    return every[:, :count]
