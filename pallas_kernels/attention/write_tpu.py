"""`write_rows` on TPUs where a scatter of rows has XLA write the whole pool again, in plain XLA.

Called by `api.py`. XLA keeps pages whose width is no multiple of 128 with the tokens last (see
`mosaic_tpu.py`), and would turn the whole pool around and back; exchanging whole pages does not.
It keeps scales in tiles with a row for each head, and would scatter them in tiles of eight, or head
by head.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Float32, Int32, Num

from pallas_kernels.attention.reference import Where
from pallas_kernels.attention.work_items import WorkItems, work_items
from pallas_kernels.quantize.words import Words, in_words

LANES = 128
"""The last dimension of a tile."""

SUBLANES = 8
"""Rows of a tile of 32 bits."""


def is_swapped(pages: Array | Words | jax.ShapeDtypeStruct) -> bool:
    """Returns whether XLA and `Words` keep pages [pages, kv_heads, page_size, width] with the
    tokens last.

    Scales [pages, kv_heads, page_size] are kept that way in any case.
    """
    return pages.ndim == 4 and pages.shape[3] % LANES != 0


def write_rows(
    pages: Num[Array, "pages kv_heads page_size width"] | Words,
    rows: Num[Array, "tokens kv_heads width"],
    where: Where,
) -> Num[Array, "pages kv_heads page_size width"] | Words:
    """Writes one array of `api.write_rows`: page by page, all neighbouring tokens of a page at
    once.

    Of several tokens at one position any one is written.
    """
    position, (pool, _, page_size, _) = where.position, pages.shape
    page, exists = find_page(pool, page_size, where)
    # A run of tokens in one page is what a run of tokens of one sequence is elsewhere.
    items = work_items(page, jnp.where(exists, position, -1), sequences=pool, largest=page_size)
    new = rows.view(pages.dtype) if rows.dtype != pages.dtype else rows
    if isinstance(pages, Words):  # neighbouring columns of a row are in a word
        new, swapped = in_words(new[..., None])[..., 0], pages.words
    else:
        swapped = jnp.swapaxes(pages, 2, 3)
    padded = jnp.pad(new, ((page_size, page_size), (0, 0), (0, 0)))
    swapped = lax.fori_loop(
        0,
        items.total[0],
        lambda item, swapped: _write_page(swapped, padded, items, item),
        swapped,
    )
    if isinstance(pages, Words):
        return dataclasses.replace(pages, words=swapped)
    return jnp.swapaxes(swapped, 2, 3)


def is_scattered_in_tiles(scales: Num[Array, "pages kv_heads page_size ..."]) -> bool:
    """Whether XLA would move the whole pool to scatter these scales: with one head, or with four
    heads in pages of several tiles. With two heads it does not; with eight it does either way."""
    if scales.ndim != 3 or scales.shape[2] % LANES:
        return False
    return scales.shape[1] == 1 or (scales.shape[1] == 4 and scales.shape[2] > LANES)


def write_scales(
    scales: Float32[Array, "pages kv_heads page_size"],
    new: Float32[Array, "tokens kv_heads"],
    where: Where,
) -> Float32[Array, "pages kv_heads page_size"]:
    """Writes one array of `api.write_rows` by a scatter into tiles that lie in memory as the pool
    does: the scales of all heads for 128 tokens, then those for the next 128.

    XLA's estimate for 8000 pages of 256 tokens of one head is 2 thousand cycles, where a scatter
    into pages has 88 (v7x) or 355 (v6e).
    """
    position, (pool, heads, page_size) = where.position, scales.shape
    page, exists = find_page(pool, page_size, where)
    units = page_size // LANES
    rows = pool * units * heads
    tile = math.gcd(rows, SUBLANES)
    first = (page * units + position % page_size // LANES) * heads
    row = jnp.where(exists, first, rows)[:, None] + jnp.arange(heads, dtype=jnp.int32)
    in_memory = scales.reshape(pool, heads, units, LANES).swapaxes(1, 2)
    tiles = in_memory.reshape(rows // tile, tile, LANES)
    lane = (position % LANES)[:, None]
    written = tiles.at[row // tile, row % tile, lane].set(new, mode="drop")
    by_heads = written.reshape(in_memory.shape).swapaxes(1, 2)
    # Without the constraint XLA may transpose the pool.
    return with_layout_constraint(by_heads, Layout((0, 2, 1, 3))).reshape(scales.shape)


def find_page(
    pool: int, page_size: int, where: Where
) -> tuple[Int32[Array, " tokens"], Bool[Array, " tokens"]]:
    """Returns the page of every token, and whether it has one."""
    page_table, sequence_of_token, position = where
    sequences, pages_per_sequence = page_table.shape
    column = position // page_size
    page = page_table.at[sequence_of_token, column].get(mode="clip")
    exists = (position >= 0) & (column < pages_per_sequence) & (page >= 0) & (page < pool)
    return page, exists & (sequence_of_token >= 0) & (sequence_of_token < sequences)


def _write_page(
    swapped: Num[Array, "pages kv_heads width page_size"],
    padded: Num[Array, "padded kv_heads width"],
    items: WorkItems,
    item: Array,
) -> Num[Array, "pages kv_heads width page_size"]:
    """Puts the tokens of an item into its page; `padded` has a page of padding before and after."""
    _, kv_heads, width, page_size = swapped.shape
    count = jnp.where(items.stride[item] == 1, items.count[item], 1)
    last = items.kv_length[item] - 1
    first_row = (last - (items.count[item] - 1) * items.stride[item]) % page_size
    # Row r of the page is for token first + r - first_row.
    start = items.first[item] - first_row + page_size
    tokens = lax.dynamic_slice_in_dim(padded, start, page_size)
    row = jnp.arange(page_size, dtype=jnp.int32)
    hit = (row >= first_row) & (row < first_row + count)
    place = (items.sequence[item], 0, 0, 0)
    old = lax.dynamic_slice(swapped, place, (1, kv_heads, width, page_size))
    new = jnp.where(hit, jnp.moveaxis(tokens, 0, 2)[None], old)
    return lax.dynamic_update_slice(swapped, new, place)
