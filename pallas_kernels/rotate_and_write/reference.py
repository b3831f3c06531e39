"""Definition of the ops in plain `jax.numpy`; runs on devices without a kernel.

All other rotations of a model use `rotate` too. Shares no code with the kernel.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Num

from pallas_kernels.attention.api import write_rows
from pallas_kernels.norm_quantize.reference import rms_norm
from pallas_kernels.quantize import EIGHT_BITS, Words, quantize_rows


def rotate(
    x: Float[Array, "tokens heads head_dim"],
    cosine: Float[Array, "tokens half"],
    sine: Float[Array, "tokens half"],
    *,
    interleaved: bool = False,
) -> Float[Array, "tokens heads head_dim"]:
    """Rotates the pairs of every head; computes in FP32, keeps x's dtype.

    Pairs are (i, i + head_dim/2), or neighbours if `interleaved`. Interleaved pairs are returned as
    two halves; queries and keys are permuted alike, so their products do not change.
    """
    x32 = x.astype(jnp.float32)
    low, high = (x32[..., ::2], x32[..., 1::2]) if interleaved else jnp.split(x32, 2, axis=-1)
    c, s = cosine[:, None, :], sine[:, None, :]
    return jnp.concatenate([low * c - high * s, high * c + low * s], axis=-1).astype(x.dtype)


def rotated(
    x: Float[Array, "tokens heads head_dim"],
    norm: Float[Array, " head_dim"] | None,
    epsilon: float,
    cosine: Float32[Array, "tokens half"],
    sine: Float32[Array, "tokens half"],
) -> Float[Array, "tokens heads head_dim"]:
    """Norms every head, if a norm is given, then rotates it."""
    return rotate(x if norm is None else rms_norm(x, norm, epsilon), cosine, sine)


def kept(
    rows: Float[Array, "tokens heads width"], pages: Num[Array, "..."] | Words
) -> tuple[Num[Array, "tokens heads width"], Float32[Array, "tokens heads"] | None]:
    """Returns rows as these pages keep them, and their scales in 8 bits; FP8 may be its bits."""
    if pages.dtype.itemsize > 1:
        return rows.astype(pages.dtype), None
    values, scales = quantize_rows(rows.reshape(-1, rows.shape[-1]), EIGHT_BITS[pages.dtype])
    return values.reshape(rows.shape), scales.reshape(rows.shape[:2])


class LatentsCall(NamedTuple):
    """A call of `latents.norm_and_write` that has been checked; `latents.py` explains the fields.

    Attributes:
      turn: cosines and sines.
      where: page table, sequences and positions.
      norms: weights of the norms of the cached latents and of the queries'.
    """

    pages: tuple[Array, ...]
    down: Float[Array, "tokens columns"]
    turn: tuple[Array, Array]
    where: tuple[Array, Array, Array]
    norms: tuple[Array, Array | None]
    epsilon: float
    interleaved: bool
    stored: bool


def norm_and_write(call: LatentsCall) -> tuple[Array, Array | None, tuple[Array, ...]]:
    """Defines `latents.norm_and_write`."""
    pages, down, turn, where, (latent_norm, query_norm), epsilon, interleaved, stored = call
    q_latent = 0 if query_norm is None else query_norm.size
    query, latent, key = jnp.split(down, [q_latent, q_latent + latent_norm.size], axis=-1)
    if query_norm is not None:
        query = rms_norm(query, query_norm, epsilon)
    latent = rms_norm(latent, latent_norm, epsilon)[:, None]
    key = rotate(key[:, None], *turn, interleaved=interleaved)
    parts = [latent, key] if len(pages) == 3 else [jnp.concatenate([latent, key], axis=-1)]
    rows = [kept(part, array) for part, array in zip(parts, pages, strict=False)]
    scales = [scales for _, scales in rows if scales is not None]
    values = [
        jnp.pad(one, ((0, 0), (0, 0), (0, array.shape[3] - one.shape[2])))
        for (one, _), array in zip(rows, pages, strict=False)
    ]
    written = write_rows(pages, (*values, *scales), *where)
    if not stored:
        return query, None, written
    back = [read_back(*row, down.dtype)[:, 0] for row in rows]
    return query, jnp.concatenate(back, axis=-1), written


def read_back(
    values: Num[Array, "tokens heads width"],
    scales: Float32[Array, "tokens heads"] | None,
    dtype: jnp.dtype,
) -> Float[Array, "tokens heads width"]:
    """Restores rows from values and scales that `kept` returned."""
    if scales is None:
        return values.astype(dtype)
    return (values.astype(jnp.float32) * scales[..., None]).astype(dtype)
