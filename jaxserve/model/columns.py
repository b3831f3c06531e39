"""Columns of embeddings, logits and heads, which `tp` devices divide. Called by `blocks.py`, the
sampler, the programs, and attention whose norms span all heads.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def norm_columns(
    own: Float[Array, "rows own"], weight: Float[Array, " own"], epsilon: float, count: int
) -> Float[Array, "rows own"]:
    """RMSNorm over `count` columns. Where this device holds fewer, the `tp` devices add up their
    sums of squares."""
    own32 = own.astype(jnp.float32)
    squares = jnp.sum(own32 * own32, axis=-1, keepdims=True)
    if own.shape[1] < count:
        squares = jax.lax.psum(squares, "tp")
    return (own32 * jax.lax.rsqrt(squares / count + epsilon)).astype(own.dtype) * weight


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
