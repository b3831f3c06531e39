"""RoPE in the form that XLA fuses into one pass on TPUs. Called by `api.py`.

XLA joins the two halves of heads in a separate pass. If halves are whole tiles of memory, a view of
the tiles has the halves on an axis of their own, where exchanging them moves no data.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

ROWS, COLUMNS = 8, 128
"""Rows and columns of a tile of memory."""


def covers(x: Float[Array, "tokens heads head_dim"]) -> bool:
    """Whether heads, and halves of a head's columns, fill whole tiles."""
    return x.shape[1] % ROWS == 0 and x.shape[2] % (2 * COLUMNS) == 0


def rotate(
    x: Float[Array, "tokens heads head_dim"],
    cosine: Float32[Array, "tokens half"],
    sine: Float32[Array, "tokens half"],
) -> Float[Array, "tokens heads head_dim"]:
    """Returns `reference.rotate` of pairs that are not interleaved."""
    tokens, heads, width = x.shape
    tiles = x.astype(jnp.float32).reshape(tokens, heads // ROWS, ROWS, 2, width // 2)
    tiles = tiles.swapaxes(2, 3)  # [tokens, _, halves, rows, half]
    c, s = cosine[:, None, None, None], sine[:, None, None, None]
    # A constant beside the sine: a signed sine would be an array of its own in every layer.
    sign = np.array([-1, 1], np.float32)[:, None, None]
    turned = tiles * c + jnp.flip(tiles, 2) * s * sign
    return turned.swapaxes(2, 3).reshape(x.shape).astype(x.dtype)
