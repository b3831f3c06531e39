"""Rotary position embedding, rotate-half ("neox") form. Called by the attention families."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rotation(
    position: Int[Array, " tokens"], head_dim: int, theta: float
) -> tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]]:
    """Cosine and sine of each token's angles, FP32."""
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = position.astype(jnp.float32)[:, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate_half(
    x: Float[Array, "tokens heads head_dim"],
    cosine: Float[Array, "tokens half"],
    sine: Float[Array, "tokens half"],
) -> Float[Array, "tokens heads head_dim"]:
    """Rotates the pairs (i, i + head_dim/2) of every head; computes in FP32, keeps x's dtype."""
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    c, s = cosine[:, None, :], sine[:, None, :]
    return jnp.concatenate([low * c - high * s, high * c + low * s], axis=-1).astype(x.dtype)
