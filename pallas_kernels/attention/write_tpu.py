"""`write_rows` on TPUs for widths that are no multiple of 128, in plain XLA.

Called by `api.py`. XLA keeps pages of such widths with the tokens last (see `mosaic_tpu.py`). A
scatter of rows has it turn the whole pool around and back; exchanging whole pages does not.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, Num

from pallas_kernels.attention.work_items import WorkItems, work_items

LANES = 128
"""The last dimension of a tile."""


def is_swapped(pages: Num[Array, "pages kv_heads page_size ..."]) -> bool:
    """Whether XLA keeps these pages with the tokens last. Scales are that way in any case."""
    return pages.ndim == 4 and pages.shape[3] % LANES != 0


def write_rows(
    pages: Num[Array, "pages kv_heads page_size width"],
    rows: Num[Array, "tokens kv_heads width"],
    page_table: Int32[Array, "sequences pages_per_sequence"],
    sequence_of_token: Int32[Array, " tokens"],
    position: Int32[Array, " tokens"],
) -> Num[Array, "pages kv_heads page_size width"]:
    """One array of `api.write_rows`: page after page, all of a page's neighbouring tokens at once.

    Of several tokens at one position any one is written.
    """
    pool, _, page_size, _ = pages.shape
    sequences, pages_per_sequence = page_table.shape
    column = position // page_size
    page = page_table.at[sequence_of_token, column].get(mode="clip")
    exists = (position >= 0) & (column < pages_per_sequence) & (page >= 0) & (page < pool)
    exists &= (sequence_of_token >= 0) & (sequence_of_token < sequences)
    # A run of tokens in one page is what a run of tokens of one sequence is elsewhere.
    items = work_items(page, jnp.where(exists, position, -1), sequences=pool, largest=page_size)
    new = rows.view(pages.dtype) if rows.dtype != pages.dtype else rows
    padded = jnp.pad(new, ((page_size, page_size), (0, 0), (0, 0)))
    swapped = lax.fori_loop(
        0,
        items.total[0],
        lambda item, swapped: _write_page(swapped, padded, items, item),
        jnp.swapaxes(pages, 2, 3),
    )
    return jnp.swapaxes(swapped, 2, 3)


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
