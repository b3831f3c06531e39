"""Pages of a few rows: the pages of each sequence are copied into larger ones that kernels take.

Called by `api.py`. Rows of compressed attention that stand for 128 tokens are one or two a page. A
TPU takes 3 or 4 bundles of instructions to start the copy of a page, while memory delivers two rows
of 512 numbers in 1 or 2; so XLA gathers, on TPUs by the SparseCores. The rows are read,
written and read again: three times the bytes of the pages, and five where a core's memory is too
small for the larger pages and they change their tiles.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels.attention.reference import Cache, PagedCall, Where, in_parts
from pallas_kernels.attention.write_tpu import LANES, is_swapped
from pallas_kernels.target import EVERY_KERNEL, Target

COPIED_BYTES = 32 * 2**20
"""Most bytes of rows that a decode step copies at a time."""

MOST_BYTES = 128 * 2**20
"""Most bytes of rows that a step copies with several tokens a sequence."""

MOST_ROWS = 512
"""Most rows of a copied page on a TPU in a decode step."""


def joined_rows(cache: Cache, target: Target) -> int:
    """Returns the rows of the larger pages; 0 where the kernels take the pages as they are, or
    refuse them whatever their size."""
    _, heads, page_size, _ = cache.k_pages.shape
    size = cache.k_pages.dtype.itemsize
    latent = cache.v_pages is None and cache.rope_pages is None and heads == 1
    if target.backend not in EVERY_KERNEL or not latent:
        return 0
    on_tpu = target.backend == "mosaic_tpu"
    if on_tpu and is_swapped(cache.k_pages):
        return 0
    rows, least = (LANES, 32 // size if size > 1 else LANES) if on_tpu else (64, 8)
    return rows if page_size % least and rows % page_size == 0 else 0


def decode_rows(rows: int, most: int) -> int:
    """Returns the rows of copied pages in a decode step whose tokens see at most `most` rows. A
    kernel requires `rows`. On a TPU pages are larger, for fewer copies to start."""
    return rows * max(1, min(MOST_ROWS, most) // rows) if rows == LANES else rows


def larger_pages(cache: Cache, rows: int) -> Cache:
    """Returns the cache, in shapes only, with pages of this number of rows."""
    _, heads, _, width = cache.k_pages.shape
    pages: Any = jax.ShapeDtypeStruct((1, heads, rows, width), cache.k_pages.dtype)
    scales: Any = None
    if cache.k_scales is not None:
        scales = jax.ShapeDtypeStruct((1, heads, rows), cache.k_scales.dtype)
    return cache._replace(k_pages=pages, k_scales=scales)


def attend(
    call: PagedCall,
    rows: int,
    kernel: Callable[
        [PagedCall],
        tuple[Float[Array, "tokens q_heads v_width"], Float32[Array, "tokens q_heads"] | None],
    ],
) -> tuple[Float[Array, "tokens q_heads v_width"], Float32[Array, "tokens q_heads"] | None]:
    """Runs `api.paged_attention` by a kernel over copies of the pages, `rows` rows each.

    In a decode step the pages of some tokens are copied at a time, otherwise those of the table.
    """
    queries, cache, (table, sequence, position) = call.queries, call.cache, call.where
    sequences, columns = table.shape
    _, _, page_size, width = cache.k_pages.shape
    if queries.shape[0] <= sequences:
        rows = decode_rows(rows, columns * page_size)
    each = rows // page_size
    large = -(-columns // each)
    table = jnp.pad(table, ((0, 0), (0, large * each - columns)))

    def run(
        queries: Array, table: Array, sequence: Array, position: Array
    ) -> tuple[Array, Array | None]:
        def copied(pages: Array, *shape: int) -> Array:
            found = pages.at[table].get(mode="clip", wrap_negative_indices=False)
            return found.reshape(-1, 1, *shape)

        scales = None if cache.k_scales is None else copied(cache.k_scales, rows)
        joined = cache._replace(k_pages=copied(cache.k_pages, rows, width), k_scales=scales)
        own = jnp.arange(table.shape[0] * large, dtype=jnp.int32).reshape(-1, large)
        where = Where(own, sequence, position)
        options: Any = {"cache": joined, "where": where, "neighbours": True}
        return kernel(call._replace(queries=queries, **options))

    if queries.shape[0] > sequences:
        return run(queries, table, sequence, position)

    def each_token(some: tuple[Array, ...]) -> tuple[Array, Array | None]:
        queries, sequence, position = some
        tokens = jnp.arange(len(queries), dtype=jnp.int32)
        return run(queries, table.at[sequence].get(mode="clip"), tokens, position)

    most = COPIED_BYTES // (large * rows * width * cache.k_pages.dtype.itemsize)
    return in_parts(each_token, (queries, sequence, position), max(1, most))
