"""Vector memory of the TPU attention kernel, and the largest tiles for which it suffices.

Called by `mosaic_tpu.py`, whose `_call` allocates the buffers counted here. Only shapes and dtypes
of a call are known here, and only those that every layer of a batch shares: `attention_places` cuts
the batch by the same tiles as `paged_attention`.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from pallas_kernels.attention.mosaic_tpu_fetch import BUFFERS
from pallas_kernels.attention.reference import Cache
from pallas_kernels.attention.tiles import TPU_CHOICES, TpuTiles, smaller_tiles
from pallas_kernels.attention.write_tpu import LANES, is_swapped
from pallas_kernels.tuned import Fields, in_force

SUBLANES_16_BITS = 16
"""Rows of a register tile of 16 bits."""

VMEM_BYTES = 56 * 2**20
"""Vector memory that the kernel may take: a v7x core has 64 MiB, v5e and v6e have 128 MiB."""

SPILLED_BYTES = 2 * 2**20
"""Vector memory left to the compiler for registers that it spills."""

MOST_TOGETHER, ROWS_TOGETHER = 8, 4096
"""Most tokens that one round attends from, and most of the positions in their blocks."""

AHEAD_BYTES, MOST_BUFFERS = 8 * 2**20, 32
"""Bytes of the buffers of blocks that hold all keys of a token each, and the most buffers.
A v7x core's memory delivers 4 MB in the microsecond that a copy takes at least."""


class Cut(NamedTuple):
    """Tiles of a call in whole pages and tokens."""

    pages_per_block: int
    tile: int
    """Query tokens per product."""
    item_tokens: int
    """Query tokens of an item, at most; a multiple of `tile`."""
    together: int = 0
    buffers: int = BUFFERS
    """Both as in `mosaic_tpu_fetch.Sizes`."""


class Need(NamedTuple):
    """Bytes of vector memory."""

    fetched: int
    """Buffers for blocks of keys, values and scales."""
    items: int
    """Queries, results and softmax state of the items."""
    temporaries: int
    """Scores and converted blocks that the compiler keeps in vector memory, and spilled
    registers."""

    def total(self) -> int:
        """All bytes."""
        return sum(self)


class Call(NamedTuple):
    """Sizes of a call that determine its tiles and its memory."""

    q_heads: int
    kv_heads: int
    group: int
    """Query heads per KV head, padded to the height of a register tile unless `compact`."""
    head_dim: int
    v_width: int
    dtype: Any
    """Dtype of queries and results."""
    pages: tuple[tuple[int, Any, bool], ...]
    """Width and dtype of every array of pages, keys first, and whether its last two dimensions are
    swapped."""
    scales: int
    """Arrays of scales."""
    page_size: int
    pages_per_sequence: int
    single: bool
    """Decode: every item has one token."""
    compact: bool
    """Rows of a tile are ordered by query heads, then by tokens; else by tokens, then by query
    heads, which are padded. Few heads padded to a register tile would multiply the work: 32 query
    heads of 8 KV heads fourfold in BF16."""
    tokens: int = 0
    window: int = 0

    def cut(self, tiles: TpuTiles) -> Cut:
        """Returns these tiles in whole pages and tokens."""
        pages, most = max(1, tiles.block_tokens // self.page_size), self.pages_per_sequence
        if self.single:
            if self.window:  # the pages of a window that begins anywhere in a page
                most = min(most, -(-(self.window - 1) // self.page_size) + 1)
            if pages < most:
                return Cut(pages, 1, 1)
            together = min(
                MOST_TOGETHER, ROWS_TOGETHER // (most * self.page_size * self.kv_heads), self.tokens
            )
            together = math.gcd(1 << max(0, together.bit_length() - 1), self.tokens)
            buffers, fetched = 4 * together, self.fetched(most)
            while 2 * buffers * fetched <= AHEAD_BYTES and buffers < MOST_BUFFERS:
                buffers *= 2
            return Cut(most, 1, 1, together, buffers)
        pages = min(pages, most)
        tile = max(1, tiles.tile_rows // self.group)
        if self.compact and tile > SUBLANES_16_BITS:
            tile = tile // SUBLANES_16_BITS * SUBLANES_16_BITS
        item_tokens = tiles.item_rows // (self.kv_heads * self.group) // tile * tile
        return Cut(pages, tile, max(tile, item_tokens))

    def fetched(self, pages: int) -> int:
        """Returns the bytes of this number of pages and their scales."""
        heads, block = self.kv_heads, pages * self.page_size
        found = self.scales * pages * _padded(heads, self.page_size, jnp.float32)
        for width, dtype, swapped in self.pages:
            found += heads * _padded(*((width, block) if swapped else (block, width)), dtype)
        return found

    def need(self, tiles: TpuTiles) -> Need:
        """Returns the memory of the kernel with these tiles."""
        pages, tile, item_tokens, together, buffers = self.cut(tiles)
        heads, block, rows = self.kv_heads, pages * self.page_size, tile * self.group
        wide = jnp.float32 in (self.dtype, *(dtype for _, dtype, _ in self.pages))
        product = jnp.dtype(jnp.float32 if wide else self.dtype)
        temporaries = SPILLED_BYTES + max(3, 2 * together) * _padded(rows, block, jnp.float32)
        for width, dtype, swapped in self.pages:
            place = (width, block) if swapped else (block, width)
            # The compiler converts the blocks of all heads before it loops over the tiles.
            if dtype != product and not self.single:
                temporaries += heads * _padded(*place, product)
        # Buffers of a token's queries, of its results and of their log-sum-exps.
        results = 2 * max(1, together)
        if self.compact:
            token = buffers * _padded(self.q_heads, self.head_dim, jnp.float32)
            token += 2 * _padded(self.q_heads, self.v_width, jnp.float32)
            token += 2 * _padded(1, self.q_heads, jnp.float32)
            ordered = heads * _padded(rows, self.head_dim, self.dtype)
        else:
            token = heads * buffers * _padded(self.group, self.head_dim, self.dtype)
            token += heads * results * _padded(self.group, self.v_width, self.dtype)
            token += results * _padded(heads, self.group, jnp.float32)
            ordered = 0
        items = item_tokens * token + item_tokens // tile * ordered
        scores, mixed = (_padded(rows, width, jnp.float32) for width in (block, self.v_width))
        column = _padded(rows, 1, jnp.float32)
        if together:
            items += together * heads * scores
        else:
            items += item_tokens // tile * heads * (scores + mixed + 3 * column)
        return Need(buffers * self.fetched(pages), items, temporaries)

    def tiles(self, device_kind: str, given: Fields | None = None) -> TpuTiles:
        """Returns the call's tiles: given, tuned, or the largest default tiles that fit.

        Raises:
          NotImplementedError: not even the smallest default tiles fit.
          ValueError: the given or tuned tiles do not fit.
        """
        heads, widths = (self.q_heads, self.kv_heads), (self.head_dim, self.v_width)
        dtype = self.pages[0][1]
        default, least = None, 0
        compact_heads = self.kv_heads if self.compact else 0
        for default in smaller_tiles(decode=self.single, compact_heads=compact_heads):
            least = self.need(default).total()
            if least <= VMEM_BYTES:
                break
        else:
            raise NotImplementedError(
                f"paged_attention with {heads[0]} query heads and {heads[1]} KV heads, widths "
                f"{widths[0]} and {widths[1]}, {dtype} pages of {self.page_size} tokens takes "
                f"{least} bytes of VMEM with its smallest tiles, at most {VMEM_BYTES} fit: use "
                "smaller pages, or divide the heads among more devices"
            )
        name = jnp.dtype(dtype).name.replace("float8_e4m3fn", "fp8").replace("uint8", "fp8")
        kind, choices = "chunk", TPU_CHOICES
        if self.single:
            kind, choices = "decode", {"block_tokens": TPU_CHOICES["block_tokens"]}
        call = f"paged_attention {kind} heads {heads[0]}/{heads[1]} widths {widths[0]}/{widths[1]}"
        tiles = in_force("attention", device_kind, f"{call} {name}", default, choices, given)
        need = self.need(tiles)
        if need.total() > VMEM_BYTES:
            raise ValueError(
                f"tiles of paged_attention: block_tokens {tiles.block_tokens} takes {need.fetched} "
                f"bytes of VMEM, item_rows {tiles.item_rows} takes {need.items} and tile_rows "
                f"{tiles.tile_rows} takes {need.temporaries}, together at most {VMEM_BYTES} fit"
            )
        return tiles


def call_of(
    queries: Array | jax.ShapeDtypeStruct,
    cache: Cache,
    page_table: Array | jax.ShapeDtypeStruct,
    window: int = 0,
) -> Call:
    """Returns the sizes of a call; only shapes and dtypes of the arguments are read."""
    tokens, q_heads, head_dim = queries.shape
    sequences, pages_per_sequence = page_table.shape
    kv_heads, page_size = cache.k_pages.shape[1:3]
    sublanes, group = 32 // queries.dtype.itemsize, q_heads // kv_heads
    # With as many tokens as sequences it is decode, whose items have one token each.
    single = tokens <= sequences
    compact = not single and group < sublanes
    arrays = (cache.k_pages, cache.v_pages, cache.rope_pages)
    pages = tuple(
        (array.shape[3], array.dtype, is_swapped(array)) for array in arrays if array is not None
    )
    return Call(
        q_heads=q_heads,
        kv_heads=kv_heads,
        group=group if compact else -(-group // sublanes) * sublanes,
        head_dim=head_dim,
        v_width=cache.v_width,
        dtype=queries.dtype,
        pages=pages,
        scales=sum(dtype.itemsize == 1 for _, dtype, _ in pages),
        page_size=page_size,
        pages_per_sequence=pages_per_sequence,
        single=single,
        compact=compact,
        tokens=tokens,
        window=window,
    )


def _padded(rows: int, width: int, dtype: DTypeLike) -> int:
    """Returns the bytes of an array in register tiles."""
    size = jnp.dtype(dtype).itemsize
    sublanes = 32 // size
    return -(-rows // sublanes) * sublanes * -(-width // LANES) * LANES * size
