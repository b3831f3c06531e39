"""Norms of latents, rotation of the key beside them, and writing, on Hopper GPUs in one launch
(Pallas, Mosaic GPU).

Called by `latents.py`, which has checked the arguments. A block of threads holds one whole token in
its registers. The key has fewer columns than the block has threads, and its pairs may be
neighbours. So every number of the key and of its angles is picked from a matrix of copies, by a sum
of one number and zeros.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.mosaic_gpu import (
    WARPGROUP,
    launch,
    load,
    narrowed,
    run_in_place,
    scales_of,
    store,
    strided,
)
from pallas_kernels.quantize import EIGHT_BITS
from pallas_kernels.rotate_and_write.mosaic_gpu import place_of
from pallas_kernels.rotate_and_write.reference import LatentsCall
from pallas_kernels.target import Target

KEYS = (64, 128)
"""Widths of the key: rows of the matrix of copies, which registers hold."""
MATRIX = plgpu.Layout.WGMMA
"""Layout of the matrix of copies; the key itself is a column."""


class Sizes(NamedTuple):
    """Properties of a call that are known when it is traced."""

    q_latent: int
    latent: int
    rope: int
    epsilon: float
    interleaved: bool


def gap(pages: tuple[Array, ...], down: Array, latent_norm: Array, query_norm: Array | None) -> str:
    """Returns the property of a call that the kernel does not cover; empty: none."""
    q_latent = 0 if query_norm is None else query_norm.size
    rope = down.shape[1] - q_latent - latent_norm.size
    if pages[0].dtype not in (jnp.bfloat16, jnp.float16, *EIGHT_BITS):
        return f"a cache in {pages[0].dtype} (there are some for 16 and 8 bits)"
    if down.dtype.itemsize != 2:
        return f"latents in {down.dtype} (there are some for 16 bits)"
    for name, columns in (("query_norm", q_latent), ("latent_norm", latent_norm.size)):
        if columns % WARPGROUP:
            return f"{name} of {columns} (multiples of {WARPGROUP})"
    if rope not in KEYS:
        return f"keys of {rope} columns ({' and '.join(map(str, KEYS))})"
    return "" if down.shape[0] else "no tokens"


def norm_and_write(
    call: LatentsCall, target: Target
) -> tuple[Array, Array | None, tuple[Array, ...]]:
    """Runs `latents.norm_and_write` for a call in which `gap` finds nothing."""
    pages, down, turn, where, norms, epsilon, interleaved, stored = call
    latent_norm, query_norm = norms
    tokens, columns = down.shape
    latent, q_latent = latent_norm.size, 0 if query_norm is None else query_norm.size
    sizes = Sizes(q_latent, latent, columns - q_latent - latent, epsilon, interleaved)
    widths = [q_latent] if q_latent else []
    if stored or not widths:  # a kernel returns something
        widths.append(columns - q_latent)
    results = tuple(jax.ShapeDtypeStruct((tokens, width), down.dtype) for width in widths)
    body = functools.partial(_body, sizes=sizes, results=len(results))
    kernel = launch(body, "norm_and_write", results, tokens, "token", target)
    weights = tuple(norm for norm in norms if norm is not None)

    found, written = run_in_place(kernel, (down, *turn, *where, *weights), pages, results)
    return found[0] if q_latent else down[:, :0], found[-1] if stored else None, written


def _body(
    down: Any,  # [tokens, q_latent + latent + rope]
    cosine: Any,  # [tokens, rope / 2]
    sine: Any,  # [tokens, rope / 2]
    *refs: Any,
    sizes: Sizes,
    results: int,
) -> None:
    """Norms, rotates and writes one token."""
    where, latent_norm, refs = refs[:3], refs[3], refs[4:]
    query_norm, refs = (refs[0], refs[1:]) if sizes.q_latent else (None, refs)
    cache, found = refs[: len(refs) - results], refs[len(refs) - results :]
    token = lax.axis_index("token")
    start = sizes.q_latent
    if query_norm is not None:
        query = _normed(down.at[token, pl.ds(0, start)], query_norm, sizes.epsilon)
        store(found[0].at[token], query)
    latent = _normed(down.at[token, pl.ds(start, sizes.latent)], latent_norm, sizes.epsilon)
    key = down.at[token, pl.ds(start + sizes.latent, sizes.rope)]
    key = _rotated(key, cosine.at[token], sine.at[token], sizes)
    parts, scales = _kept((latent, key), cache)
    if results > bool(start):
        of_row = (pl.ds(0, sizes.latent), pl.ds(sizes.latent, sizes.rope))
        for part, scale, at in zip(parts, scales, of_row, strict=True):
            back = part if scale is None else part.astype(jnp.float32) * scale
            store(found[-1].at[token, at], back.astype(down.dtype))
    page, row, exists = place_of(token, where, cache[0].shape)

    @pl.when(exists)
    def _store() -> None:
        if len(cache) == 3:
            targets = [cache[0].at[page, 0, row], cache[1].at[page, 0, row]]
        else:
            whole = cache[0].at[page, 0]
            targets = [
                whole.at[row, pl.ds(0, sizes.latent)],
                whole.at[row, pl.ds(sizes.latent, sizes.rope)],
            ]
        for one, part in zip(targets, parts, strict=True):
            store(one, part)
        if scales[0] is not None:
            cache[-1][page, 0, row] = scales[0]


def _normed(row: Any, norm: Any, epsilon: float) -> Any:
    """Returns a row [width] normed, a few numbers in each thread."""
    layout = strided(row.shape[0], most=4)
    x = load(row, layout).astype(jnp.float32)
    inverse = lax.rsqrt(jnp.sum(x * x) / row.shape[0] + epsilon)
    weight = load(norm, layout)
    return (x * inverse).astype(row.dtype) * weight


def _rotated(key: Any, cosine: Any, sine: Any, sizes: Sizes) -> Any:
    """Returns the rotated key [rope], a column of `MATRIX`: the pairs' first numbers come first."""
    half = sizes.rope // 2

    def pair(place: Any) -> Any:
        return lax.rem(place, half)

    def own(place: Any) -> Any:
        return 2 * pair(place) + place // half if sizes.interleaved else place

    def other(place: Any) -> Any:
        if sizes.interleaved:
            return 2 * pair(place) + 1 - place // half
        return lax.rem(place + half, sizes.rope)

    picked = functools.partial(_picked, rows=sizes.rope)
    place = plgpu.broadcasted_iota(jnp.int32, (sizes.rope,), 0, layout=MATRIX.reduce(1))
    partner = picked(key, other)
    partner = jnp.where(place < half, -partner, partner)
    turned = picked(key, own) * picked(cosine, pair) + partner * picked(sine, pair)
    return turned.astype(key.dtype)


def _picked(source: Any, column: Callable[[Any], Any], *, rows: int) -> Any:
    """Returns [rows] in FP32: for every row the number of `source` at index `column(row)`."""
    shape = (rows, source.shape[0])
    copies = load(source, MATRIX.reduce(0)).astype(jnp.float32)
    row, place = (
        plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=MATRIX) for axis in range(2)
    )
    one = jnp.where(place == column(row), lax.broadcast_in_dim(copies, shape, [1]), 0.0)
    return jnp.sum(one, axis=1)


def _kept(parts: tuple[Any, Any], cache: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
    """Returns latent and key as the pages keep them, and the scale of each, or None."""
    if len(cache) == 1:
        return [part.astype(cache[0].dtype) for part in parts], [None, None]
    narrow = parts[: 1 if len(cache) == 3 else 2]
    wide = [part.astype(jnp.float32) for part in narrow]
    magnitude = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(part)) for part in wide])
    scale = scales_of(magnitude, cache[0].dtype)
    kept = [narrowed(part, scale, cache[0].dtype) for part in wide]
    rest = [part.astype(cache[1].dtype) for part in parts[len(narrow) :]]
    return [*kept, *rest], [*(scale for _ in kept), *(None for _ in rest)]
