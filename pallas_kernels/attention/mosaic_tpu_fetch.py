"""Fetches keys, values and queries from HBM: the copying half of the TPU attention kernel.

Called by `mosaic_tpu_kernel.py`, the computing half, which waits for the copies. Knows refs only;
their shapes are given in comments.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

BUFFERS = 4
"""Number of block buffers: one being scored, one being mixed, and those in flight."""

AHEAD = BUFFERS - 2
"""Number of blocks fetched ahead. While block s is scored and block s - 1 mixed, block s + 2
arrives in the buffer of s - 2, which was mixed a round before. One more would overwrite s - 1."""


class Sizes(NamedTuple):
    """The static sizes of one call."""

    kv_heads: int
    group: int
    """Query heads per KV head, padded to the height of a register tile unless `compact`."""
    compact: bool
    """Whether rows of a tile are ordered by heads, then by tokens (`mosaic_tpu_memory.py`)."""
    head_dim: int
    """Width of a query and of a whole key."""
    rope_dim: int
    """Last columns of a key that lie in an array of pages of their own (`rope_pages`); 0: none."""
    v_width: int
    page_size: int
    pages_per_block: int
    tile: int
    """Query tokens per product."""
    item_tokens: int
    """Query tokens of an item, at most; a multiple of `tile`."""
    window: int
    scale: float
    """Scale of the scores times log2(e), since exponentials are powers of two."""
    dtype: Any
    """Dtype of the products' operands."""
    query_dtype: Any
    int8_products: bool
    """Whether pages in INT8 are multiplied in INT8, and not in `dtype`."""
    mask_dtype: Any = jnp.int32
    """Dtype of the positions by which values are masked: as wide as the values, where the vector
    units compare it, so that a register holds the mask of a register of values."""
    neighbours: bool = False
    """Whether the blocks of a round are pages that lie side by side."""
    together: int = 0
    """Tokens that a round takes whose keys fit one block each (`mosaic_tpu_short.py`); 0: items
    have any number of blocks."""
    buffers: int = BUFFERS
    """Buffers of blocks and of queries; a power of two."""

    @property
    def block(self) -> int:
        """KV tokens per block."""
        return self.page_size * self.pages_per_block


class Pool(NamedTuple):
    """One array of pages in HBM, and the VMEM buffers for its blocks."""

    pages: Any  # [pages, kv_heads, page_size, width] in HBM
    buffer: Any  # [buffers, kv_heads, block, width] in VMEM; in both the last two may be swapped
    scales: Any  # [pages, kv_heads, page_size] in HBM; None without scales
    scale_buffer: Any  # [buffers, pages_per_block, kv_heads, page_size] in VMEM
    swapped: bool


class Copied(NamedTuple):
    """A token-major array in HBM, and the VMEM buffer through which it is copied."""

    outside: Any  # [tokens, kv_heads, group, ...]; compact: [tokens, q_heads, ...]
    buffer: Any  # [slots, item_tokens, and as outside]


class Items(NamedTuple):
    """The fields of every work item, in scalar memory."""

    first: Any
    """First token of the item; entries behind the last item are padding tokens."""
    count: Any
    length: Any
    """Number of positions that the last token sees."""
    stride: Any
    row: Any
    """Index in the flat page table of the first page to read."""
    place: Any
    """Position in the sequence of the first token of that page."""
    pages: Any
    """Pages to read, 1 or more."""


class Producer(NamedTuple):
    """The next block to fetch."""

    item: Array
    row: Array
    """Index in the flat page table of the block's first page."""
    left: Array
    """Pages of the item that are still to be fetched; all of them at the start of an item."""
    step: Array
    """Blocks fetched before this one."""


class Fetcher:
    """Starts the copies of blocks and queries, in item order, and waits for them."""

    def __init__(
        self,
        plan: Sizes,
        items: Items,
        total: Any,  # [1]: items
        table: Any,  # [sequences * pages_per_sequence] ids of pages in the pool
        queries: Copied,
        pools: list[Pool],
        arrived: Any,  # [buffers] semaphores of blocks
        query_arrived: Any,  # [buffers] semaphores of queries
    ):
        self.plan, self.items, self.total, self.table = plan, items, total, table
        self.queries, self.pools = queries, pools
        self.arrived, self.query_arrived = arrived, query_arrived

    def first(self) -> Producer:
        """Returns the producer before anything is fetched."""
        zero = jnp.int32(0)
        return Producer(zero, self.items.row[0], self.items.pages[0], zero)

    def fetch(self, producer: Producer) -> Producer:
        """Starts the copies of a block, and of an item's queries before its first one."""
        there = producer.item < self.total[0]

        def start() -> None:
            self.fetch_first_queries(producer)
            ready = jnp.minimum(producer.left, self.plan.pages_per_block)
            pl.when(ready == self.plan.pages_per_block)(lambda: self.fetch_block(producer))
            pl.when(ready < self.plan.pages_per_block)(
                lambda: lax.fori_loop(
                    0, ready, lambda index, carry: self.fetch_page(producer, index), None
                )
            )

        pl.when(there)(start)
        return self.advance(producer, there)

    def fetch_first_queries(self, producer: Producer) -> None:
        """Starts the copies of an item's queries, if its first block is the next one."""
        item = producer.item
        pl.when(producer.left == self.items.pages[item])(
            lambda: each_token(self.items, item, lambda token: self.query_copy(item, token).start())
        )

    def fetch_block(self, producer: Producer) -> None:
        """Starts the copies of a whole block without branches, so that other work can overlap."""
        for index in range(self.plan.pages_per_block):
            self.fetch_page(producer, index)

    def fetch_page(self, producer: Producer, index: Any) -> None:
        number = self.table[producer.row + index]
        for copy in self.page_copies(number, producer.step & (self.plan.buffers - 1), index):
            copy.start()

    def advance(self, producer: Producer, there: Any) -> Producer:
        """Returns the block after this one; this one again if it does not exist (not `there`)."""
        item, row, left, step = producer
        following = jnp.minimum(item + 1, self.items.first.shape[0] - 1)
        done = there & (left <= self.plan.pages_per_block)
        taken = jnp.where(there, self.plan.pages_per_block, 0)
        return Producer(
            jnp.where(done, item + 1, item),
            jnp.where(done, self.items.row[following], row + taken),
            jnp.where(done, self.items.pages[following], left - taken),
            jnp.where(there, step + 1, step),
        )

    def page_copies(self, number: Any, slot: Any, index: Any) -> Iterator[Any]:
        """Yields the copies of page `number` to entry `index` of a buffer."""
        size = self.plan.page_size
        rows = pl.ds(pl.multiple_of(index * size, size), size)
        arrived = self.arrival(slot)
        for pool in self.pools:
            place = (
                (slot, slice(None), slice(None), rows)
                if pool.swapped
                else (slot, slice(None), rows)
            )
            yield pltpu.make_async_copy(pool.pages.at[number], pool.buffer.at[place], arrived)
            if pool.scales is not None:
                yield pltpu.make_async_copy(
                    pool.scales.at[number], pool.scale_buffer.at[slot, index], arrived
                )

    def arrival(self, slot: Any) -> Any:
        """Returns the semaphore of a slot. Tokens of one round share that of the first."""
        return self.arrived.at[slot & -max(1, self.plan.together)]

    def await_block(self, slot: Any) -> None:
        """Waits for the copies of a whole block: one wait a buffer, since semaphores count
        bytes."""
        # All arrays of a block share one semaphore. Each wait takes its bytes off it, and all waits
        # together take the whole block's: a copy left out would end the next block's wait early.
        for pool in self.pools:
            for buffer in (pool.buffer, pool.scale_buffer):
                if buffer is not None:
                    there = buffer.at[slot]
                    pltpu.make_async_copy(there, there, self.arrival(slot)).wait()

    def await_pages(self, slot: Any, pages: Any) -> None:
        """Waits for the copies of the first `pages` pages of a block."""

        def page(index: Any, carry: None) -> None:
            for copy in self.page_copies(0, slot, index):  # only the size counts: any page does
                copy.wait()

        lax.fori_loop(0, pages, page, None)

    def query_copy(self, item: Any, token: Any) -> Any:
        # Every item has a block, so the blocks fetched ahead belong to items at most `AHEAD` ahead,
        # and their queries never arrive over those of the item at hand.
        slot = item & (self.plan.buffers - 1)
        return pltpu.make_async_copy(
            self.queries.outside.at[self.items.first[item] + token],
            self.queries.buffer.at[slot, token],
            self.query_arrived.at[slot],
        )

    def await_queries(self, item: Any) -> None:
        """Waits for the copies of an item's queries."""
        each_token(self.items, item, lambda token: self.query_copy(item, token).wait())


def each_token(items: Items, item: Any, do: Callable[[Any], None]) -> None:
    """Calls `do` with the number of each token of an item."""
    lax.fori_loop(0, items.count[item], lambda token, carry: do(token), None)
