"""Attention to chosen rows by the kernels of `paged_attention`, over copies that XLA gathers.

Called by `api.py`, which has checked the arguments. The rows of a token become the pages of a
sequence of its own. They are read, written and read again: three times the bytes of a kernel that
fetched them itself. On a TPU such a kernel would move more: with a row of 8 bits come the three
beside it, 2,560 bytes for 576, and 2,048 copies a token are started one by one, whereas XLA gathers
by the SparseCores.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Num

from pallas_kernels.attention import api
from pallas_kernels.attention.joined import decode_rows
from pallas_kernels.attention.reference import Cache, PagedCall, Where, in_parts
from pallas_kernels.attention.write_tpu import LANES, is_swapped
from pallas_kernels.quantize.bits import as_bits
from pallas_kernels.sparse_attention.reference import Chosen
from pallas_kernels.target import Target, kernels

GATHERED_BYTES = 128 * 2**20
"""Most bytes of chosen rows that are copied at a time: 107 tokens of DeepSeek-V3.2 in 8 bits."""


def gap(queries: Float[Array, "..."], cache: Cache, target: Target) -> str:
    """Returns the property of a call that the kernels do not cover; empty: none."""
    pages = cache.k_pages
    if cache.rope_pages is not None:
        return "rows whose rotated part is in an array of its own"
    if target.backend == "mosaic_tpu" and is_swapped(pages) and not target.interpret:
        return f"rows of {pages.shape[3]} columns, no multiple of 128: XLA copies the whole pool"
    size = _page_size(target)
    copied: Any = jax.ShapeDtypeStruct((1, 1, size, pages.shape[3]), pages.dtype)
    return api.kernel_gap(target, queries, cache._replace(k_pages=copied))


def attend_chosen(
    queries: Float[Array, "tokens q_heads head_dim"],
    cache: Cache,
    where: Chosen,
    scale: float,
    target: Target,
) -> tuple[Float[Array, "tokens q_heads v_width"], Float32[Array, "tokens q_heads"]]:
    """`api.attend_chosen`, if `gap` finds nothing in the call."""
    page_size, width = cache.k_pages.shape[2:]
    most = where.chosen.shape[1]
    size = decode_rows(_page_size(target), most)
    pages = -(-most // size)

    def attend(some: tuple[Array, ...]) -> tuple[Array, Array]:
        queries, chosen, sequence = some
        tokens = len(queries)
        row = jnp.pad(chosen, ((0, 0), (0, pages * size - most)), constant_values=-1)
        own, place = where.page_table.at[sequence].get(mode="clip"), jnp.maximum(row, 0)
        page = jnp.take_along_axis(own, place // page_size, axis=1, mode="clip")
        place = (page * page_size + place % page_size).reshape(-1)
        gather = functools.partial(_gather, place=place, shape=(tokens * pages, 1, size))
        scales = None if cache.k_scales is None else gather(cache.k_scales)
        copied = cache._replace(k_pages=gather(cache.k_pages), k_scales=scales)
        table = jnp.arange(tokens * pages, dtype=jnp.int32).reshape(tokens, pages)
        last = jnp.sum(chosen >= 0, axis=1, dtype=jnp.int32) - 1
        copies = Where(table, jnp.arange(tokens, dtype=jnp.int32), last)
        options: Any = {"out_dtype": queries.dtype, "with_lse": True, "neighbours": True}
        call = PagedCall(queries, copied, copies, 0, scale, **options)
        found: tuple[Array, Array] = kernels("attention", target).paged_attention(call, target)
        return found

    tokens = queries, where.chosen, where.sequence_of_token
    row_bytes = width * cache.k_pages.dtype.itemsize
    return in_parts(attend, tokens, max(1, GATHERED_BYTES // (pages * size * row_bytes)))


def _gather(
    pages: Num[Array, "pages 1 page_size *width"],
    place: Int32[Array, " rows"],
    shape: tuple[int, ...],
) -> Num[Array, "..."]:
    """Returns the rows at these places of the pool as pages of another pool."""
    rows = as_bits(pages).reshape(-1, *pages.shape[3:])
    return rows.at[place].get(mode="clip").reshape(*shape, *pages.shape[3:])


def _page_size(target: Target) -> int:
    return LANES if target.backend == "mosaic_tpu" else 64
