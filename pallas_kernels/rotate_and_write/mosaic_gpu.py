"""Rotation and writing on Hopper GPUs (Pallas, Mosaic GPU), in one launch.

Called by `api.py`, which has checked the arguments. A block of threads has either one token's key
and value of one head, which it quantises and writes to their page, or 64 rows of queries, a row
being a head of a token. The time goes into launching a kernel and into the way to memory and back;
the two kinds of blocks run side by side.
"""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.attention.mosaic_gpu_plan import TERMS, compute_dtype
from pallas_kernels.attention.two_terms import LARGEST_FP8, SMALLEST_QUERY, TwoTerms
from pallas_kernels.mosaic_gpu import (
    WARPGROUP,
    launch,
    load,
    quantise,
    run_in_place,
    store,
    strided,
)
from pallas_kernels.quantize import EIGHT_BITS
from pallas_kernels.quantize.bits import from_bits
from pallas_kernels.target import Target

MOST_COLUMNS = 256
"""Most columns of a row, which is copied in one piece."""
ROWS = 64
"""Rows of queries that a block has."""
COLUMNS = 64
"""Columns of queries that are rotated at a time."""


def gap(pages: tuple[Array, ...], query: Array, value: Array) -> str:
    """Returns the property of a call that the kernel does not cover; empty: none."""
    tokens, heads, width = query.shape
    if pages[0].dtype not in (jnp.bfloat16, jnp.float16, *EIGHT_BITS):
        return f"a cache in {pages[0].dtype} (there are some for 16 and 8 bits)"
    if query.dtype.itemsize != 2:
        return f"keys in {query.dtype} (there are some for 16 bits)"
    for name, columns in (("head_dim", width), ("values of", value.shape[2])):
        if columns % WARPGROUP or columns > MOST_COLUMNS:
            return f"{name} {columns} (multiples of {WARPGROUP} up to {MOST_COLUMNS})"
    if heads % ROWS and ROWS % heads:
        return f"{heads} query heads (divisors or multiples of {ROWS})"
    if tokens * heads % ROWS or not tokens:
        return f"{tokens} tokens of {heads} query heads (together a multiple of {ROWS})"
    return ""


def rotate_and_write(
    pages: tuple[Array, ...],
    heads: tuple[Array, Array, Array, Array | None],
    turn: tuple[Array, Array],
    where: tuple[Array, Array, Array],
    norms: tuple[Array | None, Array | None],
    *,
    epsilon: float,
    target: Target,
) -> tuple[Array | TwoTerms, tuple[Array, ...]]:
    """Runs `api.rotate_and_write` for a call in which `gap` finds nothing; `heads` are queries,
    keys, values and `joined`."""
    query, key, value, joined = heads
    tokens, q_heads, width = query.shape
    kv_heads = key.shape[1]
    key, value = (x.reshape(tokens, -1) for x in (key, value))
    first = 0, 0
    if joined is not None:
        at = joined.shape[1] - value.shape[1]
        first, key, value = (at - key.shape[1], at), joined, joined
    rows = tokens * q_heads
    kept = {name: norm for name, norm in zip(("q", "k"), norms, strict=True) if norm is not None}
    dtype = from_bits(pages[0]).dtype
    results = [jax.ShapeDtypeStruct((rows, width), compute_dtype(dtype))]
    if dtype == jnp.float8_e4m3fn:
        results = [
            jax.ShapeDtypeStruct((TERMS, rows, width), dtype),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ]
    scratch: dict[str, Any] = {
        "key_smem": plgpu.SMEM((2 * width,), key.dtype),
        "cosine_smem": plgpu.SMEM((width,), jnp.float32),
        "sine_smem": plgpu.SMEM((width,), jnp.float32),
        "loaded": plgpu.Barrier(num_arrivals=6 + 2 * ("k" in kept)),
    }
    if "k" in kept:
        scratch["norm_smem"] = plgpu.SMEM((2 * width,), key.dtype)
    kernel = launch(
        functools.partial(
            _body,
            names=tuple(kept),
            sizes=(q_heads, kv_heads, len(results)),
            first=first,
            epsilon=epsilon,
        ),
        "rotate_and_write",
        results,
        *(tokens * kv_heads + rows // ROWS, "block"),
        target,
        scratch,
    )
    arguments = (query.reshape(rows, width), key, value, *turn, *where, *kept.values())
    found, written = run_in_place(kernel, arguments, pages, results)
    if len(found) == 1:
        return found[0].reshape(query.shape), written
    values, scales = found
    return TwoTerms(values.reshape(TERMS, *query.shape), scales.reshape(tokens, q_heads)), written


def _body(
    query: Any,  # [tokens * q_heads, width]
    key: Any,  # [tokens, columns]
    value: Any,  # [tokens, columns]
    cosine: Any,  # [tokens, width / 2]
    sine: Any,  # [tokens, width / 2]
    *refs: Any,
    names: tuple[str, ...],
    sizes: tuple[int, int, int],
    first: tuple[int, int],
    epsilon: float,
    **scratch: Any,
) -> None:
    """Runs one block: writes a token's key and value of one head, or rotates 64 rows of queries.

    Args:
      sizes: heads of queries, heads of keys, and arrays that the queries are returned in.
      first: first column of keys and of values.
    """
    q_heads, kv_heads, results = sizes
    where, refs = refs[:3], refs[3:]
    norms, refs = dict(zip(names, refs, strict=False)), refs[len(names) :]
    cache, rotated = refs[:-results], refs[-results:]
    smem = SimpleNamespace(**scratch)
    block, of_keys = lax.axis_index("block"), key.shape[0] * kv_heads

    @pl.when(block < of_keys)
    def _write() -> None:
        token, head = block // kv_heads, lax.rem(block, kv_heads)
        k, v = (
            x.at[token, pl.ds(start + head * pages.shape[3], pages.shape[3])]
            for x, start, pages in zip((key, value), first, cache, strict=False)
        )
        row = _rotated_key(k, cosine.at[token], sine.at[token], norms, smem, epsilon)
        _store_rows((row, _loaded(v)), cache, where, token, head)

    @pl.when(block >= of_keys)
    def _rotate() -> None:
        start = (block - of_keys) * ROWS
        _rotate_queries(query, cosine, sine, norms.get("q"), rotated, start, q_heads, epsilon)


def _loaded(row: Any) -> Any:
    """Loads a row into registers, one or two numbers in each thread."""
    return load(row, strided(row.shape[0], most=1))


def _rotated_key(
    key: Any, cosine: Any, sine: Any, norms: dict[str, Any], smem: SimpleNamespace, epsilon: float
) -> Any:
    """Returns a key [width], normed if it has a norm, and rotated.

    Each row is copied to shared memory twice, one copy behind the other. Read from the middle of
    the first copy on, it has at every place the number that is rotated with the one at this place.
    """
    width, half = key.shape[0], key.shape[0] // 2
    copies = [(key, smem.key_smem, width), (cosine, smem.cosine_smem, half)]
    copies += [(sine, smem.sine_smem, half)]
    if "k" in norms:
        copies.append((norms["k"], smem.norm_smem, width))
    for source, target, size in copies:
        for start in (0, size):
            plgpu.copy_gmem_to_smem(source, target.at[pl.ds(start, size)], smem.loaded)
    plgpu.barrier_wait(smem.loaded)

    def both(ref: Any) -> tuple[Any, Any]:
        return _loaded(ref.at[pl.ds(0, width)]), _loaded(ref.at[pl.ds(half, width)])

    own, other = (x.astype(jnp.float32) for x in both(smem.key_smem))
    if "k" in norms:
        inverse = lax.rsqrt(jnp.sum(own * own) / width + epsilon)
        own, other = (
            ((x * inverse).astype(key.dtype) * weight).astype(jnp.float32)
            for x, weight in zip((own, other), both(smem.norm_smem), strict=True)
        )
    place = plgpu.broadcasted_iota(jnp.int32, (width,), 0, layout=strided(width, most=1))
    other = jnp.where(place < half, -other, other)
    turned = own * _loaded(smem.cosine_smem) + other * _loaded(smem.sine_smem)
    return turned.astype(key.dtype)


def place_of(
    token: Any, where: tuple[Any, ...], pages: tuple[int, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns a token's page, its row there, and whether it has one, in pages of this shape."""
    page_table, sequence_of_token, position = where
    (sequences, columns), (pool, _, page_size, _) = page_table.shape, pages
    sequence, place = sequence_of_token[token], position[token]
    column = place // page_size
    page = page_table[jnp.clip(sequence, 0, sequences - 1), jnp.clip(column, 0, columns - 1)]
    exists = (place >= 0) & (column < columns) & (sequence >= 0) & (sequence < sequences)
    exists &= (page >= 0) & (page < pool)
    return page, lax.rem(place, page_size), exists


def _store_rows(
    rows: tuple[Any, Any], cache: tuple[Any, ...], where: tuple[Any, ...], token: Any, head: Any
) -> None:
    """Writes a token's key and value, quantised if need be, to its page, if it has one."""
    page, row, exists = place_of(token, where, cache[0].shape)
    kept: list[Any] = [x.astype(array.dtype) for x, array in zip(rows, cache[:2], strict=True)]
    scales: list[Any] = []
    if len(cache) == 4:
        narrow = [quantise(x.astype(jnp.float32), cache[0].dtype) for x in rows]
        kept, scales = [x for x, _ in narrow], [scale for _, scale in narrow]

    @pl.when(exists)
    def _store() -> None:
        for array, x in zip(cache[:2], kept, strict=True):
            store(array.at[page, head, row], x)
        for array, scale in zip(cache[2:], scales, strict=True):
            array[page, head, row] = scale


def _rotate_queries(
    query: Any,
    cosine: Any,
    sine: Any,
    norm: Any,
    rotated: tuple[Any, ...],
    first: Any,
    q_heads: int,
    epsilon: float,
) -> None:
    """Rotates `ROWS` rows of queries from `first` on; rows of one token share their angles."""
    layout, width = plgpu.Layout.WGMMA, query.shape[1]
    half, rows = width // 2, pl.ds(first, ROWS)
    tokens = range(max(1, ROWS // q_heads))
    first_token = first // q_heads
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS, COLUMNS), 0, layout=layout)

    def columns_of(vector: Any, start: int) -> Any:
        found = load(vector.at[pl.ds(start, COLUMNS)], layout.reduce(0))
        return lax.broadcast_in_dim(found, (ROWS, COLUMNS), [1])

    def of_rows(angles: Any, start: int) -> Any:
        found = columns_of(angles.at[first_token], start)
        for index in tokens[1:]:
            other = columns_of(angles.at[first_token + index], start)
            found = jnp.where(row // q_heads >= index, other, found)
        return found

    parts = {
        start: load(query.at[rows, pl.ds(start, COLUMNS)], layout)
        for start in range(0, width, COLUMNS)
    }
    inverse = None
    if norm is not None:
        squares = [jnp.square(part.astype(jnp.float32)) for part in parts.values()]
        total = functools.reduce(jnp.add, [jnp.sum(square, axis=1) for square in squares])
        inverse = lax.rsqrt(total / width + epsilon)
        inverse = lax.broadcast_in_dim(inverse, (ROWS, COLUMNS), [0])
    for start in range(0, half, COLUMNS):
        low, high = (parts[at].astype(jnp.float32) for at in (start, start + half))
        if inverse is not None:
            low, high = (
                ((x * inverse).astype(query.dtype) * columns_of(norm, at)).astype(jnp.float32)
                for x, at in ((low, start), (high, start + half))
            )
        c, s = of_rows(cosine, start), of_rows(sine, start)
        parts[start] = (low * c - high * s).astype(query.dtype)
        parts[start + half] = (high * c + low * s).astype(query.dtype)
    if len(rotated) > 1:
        _store_terms(parts, rows, *rotated)
        return
    for at, part in parts.items():
        store(rotated[0].at[rows, pl.ds(at, COLUMNS)], part.astype(rotated[0].dtype))


def _store_terms(parts: dict[int, Any], rows: Any, values: Any, scales: Any) -> None:
    """Stores rows, given by the first columns of their parts, as `TwoTerms`."""
    of_parts = [jnp.max(jnp.abs(part.astype(jnp.float32)), axis=1) for part in parts.values()]
    largest = functools.reduce(jnp.maximum, of_parts)
    scale = jnp.where(
        largest < SMALLEST_QUERY, jnp.ones_like(largest), largest * (1.0 / LARGEST_FP8)
    )
    store(scales.at[rows], scale)
    inverse = lax.broadcast_in_dim(1.0 / scale, (ROWS, COLUMNS), [0])
    for at, part in parts.items():
        wide, columns = part.astype(jnp.float32) * inverse, pl.ds(at, COLUMNS)
        term = wide.astype(values.dtype)
        store(values.at[0, rows, columns], term)
        term = (wide - term.astype(jnp.float32)).astype(values.dtype)
        store(values.at[1, rows, columns], term)
