"""The body of the Mosaic TPU kernel of paged attention.

Called by `mosaic_tpu.py`, which says how it works, lays out its memory and cuts the batch. Knows
refs only. Shapes of refs are beside them.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

BUFFERS = 4
"""Blocks that there is room for: one to score, one to mix, and those that are on their way."""

AHEAD = BUFFERS - 2
"""Blocks that are fetched before they are needed."""

LOWEST = -1e30
"""A largest score so far that is none; finite, so that no difference is of infinities."""


class Plan(NamedTuple):
    """The static sizes of one call."""

    kv_heads: int
    group: int
    """Query heads of a KV head, padded to what a tile of registers holds."""
    head_dim: int
    v_width: int
    page_size: int
    pages_per_block: int
    pages_per_sequence: int
    pool: int
    """Pages that there are."""
    tile: int
    """Query tokens that are multiplied at a time."""
    item_tokens: int
    """Query tokens of an item, at most; a multiple of `tile`."""
    window: int
    scale: float
    """On scores, with the logarithm's base: exponentials are powers of two."""
    dtype: Any
    """Of the products' operands."""

    @property
    def block(self) -> int:
        """KV tokens of a block."""
        return self.page_size * self.pages_per_block


class Pool(NamedTuple):
    """One array of pages: where it lies, and the buffers its blocks go to."""

    pages: Any  # [pages, kv_heads, page_size, width] in HBM
    buffer: Any  # [BUFFERS, kv_heads, block, width] in VMEM; in both the last two may be swapped
    scales: Any  # [pages, kv_heads, page_size] in HBM; None without scales
    scale_buffer: Any  # [BUFFERS, pages_per_block, kv_heads, page_size] in VMEM
    swapped: bool


class Copied(NamedTuple):
    """An array in HBM, one token after the other, and the buffer in VMEM that it goes through."""

    outside: Any  # [tokens, kv_heads, group, ...]
    buffer: Any  # [slots, item_tokens, kv_heads, group, ...]


class Items(NamedTuple):
    """What the scalar memory holds of every work item."""

    first: Any
    count: Any
    length: Any
    """Positions that the last token sees."""
    stride: Any
    row: Any
    """Index in the flat page table of the first page to read."""
    place: Any
    """Position of that page's first token."""
    pages: Any
    """Pages to read, 1 or more."""


class State(NamedTuple):
    """What is kept of the item in work, in VMEM; [tiles, kv_heads, rows, ...] each."""

    scores: Any  # of the block that is to be mixed
    largest_of_block: Any
    largest: Any
    total: Any
    mixed: Any


class Producer(NamedTuple):
    """The next block to fetch."""

    item: Array
    row: Array
    """Of the page table."""
    left: Array
    """Pages of the item that are still to be fetched; as many as it has: it is a new item."""
    step: Array
    """Blocks fetched before this one."""


class Mask(NamedTuple):
    """For a block of which not every query sees everything."""

    item: Any
    base: Any
    """Position of the block's first token."""


class Kernel:
    """The body of the kernel."""

    def __init__(
        self,
        plan: Plan,
        items: Items,
        total: Any,
        table: Any,
        queries: Copied,
        pools: list[Pool],
        outputs: list[Copied],
        state: State,
        arrived: Any,
        query_arrived: Any,
        written: Any,
    ):
        self.plan, self.items, self.total, self.table = plan, items, total, table
        self.queries, self.pools, self.outputs, self.state = queries, pools, outputs, state
        self.arrived, self.query_arrived, self.written = arrived, query_arrived, written

    def run(self) -> None:
        """Walks the items."""
        zero = jnp.int32(0)
        producer = Producer(zero, self.items.row[0], self.items.pages[0], zero)
        for _ in range(AHEAD):
            producer = self.fetch(producer)
        lax.fori_loop(0, self.total[0], self.attend, (zero, producer))
        for before in (2, 1):
            pl.when(self.total[0] >= before)(
                functools.partial(self.await_written, self.total[0] - before)
            )

    # Fetching

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
        new = producer.left == self.items.pages[producer.item]
        pl.when(new)(lambda: self.fetch_queries(producer.item))

    def fetch_block(self, producer: Producer) -> None:
        """Starts the copies of a whole block, without branches: other work can go beside it."""
        for index in range(self.plan.pages_per_block):
            self.fetch_page(producer, index)

    def fetch_page(self, producer: Producer, index: Any) -> None:
        number = jnp.clip(self.table[producer.row + index], 0, self.plan.pool - 1)
        for copy in self.page_copies(number, producer.step & (BUFFERS - 1), index):
            copy.start()

    def advance(self, producer: Producer, there: Any) -> Producer:
        """The block after this one, if this one is `there`."""
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
        """Of page `number` to place `index` of a buffer."""
        size = self.plan.page_size
        rows = pl.ds(pl.multiple_of(index * size, size), size)
        for pool in self.pools:
            place = (
                (slot, slice(None), slice(None), rows)
                if pool.swapped
                else (slot, slice(None), rows)
            )
            yield pltpu.make_async_copy(
                pool.pages.at[number], pool.buffer.at[place], self.arrived.at[slot]
            )
            if pool.scales is not None:
                yield pltpu.make_async_copy(
                    pool.scales.at[number], pool.scale_buffer.at[slot, index], self.arrived.at[slot]
                )

    def await_block(self, slot: Any) -> None:
        """Waits for the copies of a whole block: semaphores count bytes, one wait is enough."""
        for pool in self.pools:
            for buffer in (pool.buffer, pool.scale_buffer):
                if buffer is not None:
                    there = buffer.at[slot]
                    pltpu.make_async_copy(there, there, self.arrived.at[slot]).wait()

    def await_pages(self, slot: Any, pages: Any) -> None:
        """Waits for the copies of so many pages of a block."""

        def page(index: Any, carry: None) -> None:
            for copy in self.page_copies(0, slot, index):
                copy.wait()

        lax.fori_loop(0, pages, page, None)

    def fetch_queries(self, item: Any) -> None:
        """Starts the copies of an item's queries."""
        self.each_token(item, lambda token: self.query_copy(item, token).start())

    def query_copy(self, item: Any, token: Any) -> Any:
        slot = item & (BUFFERS - 1)
        return pltpu.make_async_copy(
            self.queries.outside.at[self.items.first[item] + token],
            self.queries.buffer.at[slot, token],
            self.query_arrived.at[slot],
        )

    def each_token(self, item: Any, do: Callable[[Any], None]) -> None:
        """For each of an item's tokens."""
        lax.fori_loop(0, self.items.count[item], lambda token, carry: do(token), None)

    # Attending

    def attend(self, item: Any, carry: tuple[Any, Producer]) -> tuple[Any, Producer]:
        """All of an item: its blocks, one round each and one more."""
        plan, items, state = self.plan, self.items, self.state
        self.each_token(item, lambda token: self.query_copy(item, token).wait())
        state.largest[...] = jnp.full_like(state.largest, LOWEST)
        state.total[...] = jnp.zeros_like(state.total)
        state.mixed[...] = jnp.zeros_like(state.mixed)
        pages, place, last = items.pages[item], items.place[item], items.length[item] - 1
        blocks = lax.div(pages + (plan.pages_per_block - 1), plan.pages_per_block)
        first = last - (items.count[item] - 1) * items.stride[item]
        # Blocks of which all queries see everything.
        clear_to = lax.div(jnp.maximum(first + 1 - place, 0), plan.block)
        clear_from = jnp.int32(0)
        if plan.window:
            hidden = jnp.maximum(last + 1 - plan.window - place, 0)
            clear_from = lax.div(hidden + (plan.block - 1), plan.block)

        def a_round(number: Any, carry: tuple[Any, Producer]) -> tuple[Any, Producer]:
            step, producer = carry
            slot, before = step & (BUFFERS - 1), (step - 1) & (BUFFERS - 1)
            base = place + number * plan.block
            scores = number < blocks
            there = scores & (producer.item < self.total[0])
            # This block and the one before hold nothing to mask, and a whole block is to fetch.
            steady = (number > clear_from) & (number < clear_to)
            steady &= there & (producer.left >= plan.pages_per_block)

            def both(tile: Any, tokens: int) -> None:
                self.mix(item, tile, tokens, before, None)
                self.score(item, tile, tokens, slot, None)

            def steadily() -> None:
                self.fetch_first_queries(producer)
                self.await_block(slot)
                self.each_tile(item, both, lambda: self.fetch_block(producer))

            def receive() -> None:
                self.fetch(producer)
                ready = jnp.minimum(pages - number * plan.pages_per_block, plan.pages_per_block)
                self.await_pages(slot, ready)

            def mix(tile: Any, tokens: int) -> None:
                self.mix(item, tile, tokens, before, Mask(item, base - plan.block))

            def score(tile: Any, tokens: int) -> None:
                self.score(item, tile, tokens, slot, Mask(item, base))

            pl.when(steady)(steadily)
            other = jnp.logical_not(steady)
            pl.when(other & scores)(receive)
            pl.when(other & (number > 0))(lambda: self.each_tile(item, mix))
            pl.when(other & scores)(lambda: self.each_tile(item, score))
            return jnp.where(scores, step + 1, step), self.advance(producer, there)

        step, producer = lax.fori_loop(0, blocks + 1, a_round, carry)
        self.write(item)
        return step, producer

    def each_tile(
        self,
        item: Any,
        do: Callable[[Any, int], None],
        beside: Callable[[], None] = lambda: None,
    ) -> None:
        """For each of an item's tiles: do(its number, its tokens); `beside` once."""
        count, tile = self.items.count[item], self.plan.tile

        def one() -> None:
            do(0, 1)
            beside()

        def several() -> None:
            beside()
            tiles = lax.div(count + (tile - 1), tile)
            lax.fori_loop(0, tiles, lambda number, carry: do(number, tile), None)

        if self.plan.item_tokens == 1:
            one()
            return
        pl.when(count == 1)(one)
        pl.when(count > 1)(several)

    def score(self, item: Any, tile: Any, tokens: int, slot: Any, mask: "Mask | None") -> None:
        """Scores of a tile and the block in a slot, and the rows' largest."""
        plan, state, rows = self.plan, self.state, tokens * self.plan.group
        item_slot = item & (BUFFERS - 1)
        for head in range(plan.kv_heads):
            which = pl.ds(tile * plan.tile, tokens)
            queries = self.queries.buffer[item_slot, which, head].reshape(rows, plan.head_dim)
            keys = _converted(self.pools[0].buffer[slot, head], plan.dtype)
            # [rows, block]
            scores = _product(queries.astype(plan.dtype), keys, 0 if self.pools[0].swapped else 1)
            if self.pools[0].scales is not None:
                scores *= self.scale_row(self.pools[0], slot, head) * plan.scale
            else:
                scores *= plan.scale
            if mask is not None:
                scores = jnp.where(self.visible(mask, tile, rows), scores, -jnp.inf)
            state.scores[tile, head, :rows] = scores
            state.largest_of_block[tile, head, :rows] = jnp.max(scores, axis=1, keepdims=True)

    def mix(self, item: Any, tile: Any, tokens: int, slot: Any, mask: "Mask | None") -> None:
        """Adds the values of the block in a slot to what a tile has mixed of those before."""
        plan, state, rows = self.plan, self.state, tokens * self.plan.group
        for head in range(plan.kv_heads):
            at = (tile, head, slice(rows))
            before = state.largest[at]
            largest = jnp.maximum(before, state.largest_of_block[at])
            weights = jnp.exp2(state.scores[at] - largest)
            fade = jnp.exp2(before - largest)
            state.largest[at] = largest
            state.total[at] = state.total[at] * fade + jnp.sum(weights, axis=1, keepdims=True)
            values = self.values(slot, head)
            tokens_axis = 1 if self.pools[-1].swapped else 0
            if mask is not None:
                seen = self.seen(mask, values.shape, tokens_axis)
                values = jnp.where(seen, values, jnp.zeros_like(values))
            if self.pools[-1].scales is not None:
                scales = self.scale_row(self.pools[-1], slot, head)
                if mask is not None:
                    scales = jnp.where(self.seen(mask, scales.shape, 1), scales, 0.0)
                weights *= scales
            mixed = _product(weights.astype(plan.dtype), values, tokens_axis)
            state.mixed[at] = state.mixed[at] * fade + mixed

    def values(self, slot: Any, head: int) -> Array:
        """Values of a block, [block, v_width] or swapped."""
        pool, width = self.pools[-1], slice(self.plan.v_width)
        which = (width, slice(None)) if pool.swapped else (slice(None), width)
        return _converted(pool.buffer[(slot, head, *which)], self.plan.dtype)

    def scale_row(self, pool: Pool, slot: Any, head: int) -> Array:
        """Scales of a block, [1, block]."""
        pages = [
            pool.scale_buffer[slot, page, pl.ds(head, 1)]
            for page in range(self.plan.pages_per_block)
        ]
        return jnp.concatenate(pages, axis=1)

    def visible(self, mask: "Mask", tile: Any, rows: int) -> Array:
        """Which query sees which position of a block, [rows, block]."""
        items, shape = self.items, (rows, self.plan.block)
        place = mask.base + lax.broadcasted_iota(jnp.int32, shape, 1)
        token = lax.div(lax.broadcasted_iota(jnp.int32, shape, 0), self.plan.group)
        after = items.count[mask.item] - 1 - tile * self.plan.tile - token
        own = items.length[mask.item] - 1 - after * items.stride[mask.item]
        visible = place <= own
        return visible & (place > own - self.plan.window) if self.plan.window else visible

    def seen(self, mask: "Mask", shape: tuple[int, ...], axis: int) -> Array:
        """Which positions of a block some query of the item sees; the others may hold NaN."""
        place = mask.base + lax.broadcasted_iota(jnp.int32, shape, axis)
        last = self.items.length[mask.item] - 1
        if not self.plan.window:
            return place <= last
        first = last - (self.items.count[mask.item] - 1) * self.items.stride[mask.item]
        return (place <= last) & (place > first - self.plan.window)

    # Writing

    def write(self, item: Any) -> None:
        """Divides by the totals, and starts the copies of an item's results."""
        pl.when(item >= 2)(lambda: self.await_written(item - 2))
        self.each_tile(item, functools.partial(self.finish, item))

        def start(token: Any) -> None:
            for copy in self.output_copies(item, token):
                copy.start()

        self.each_token(item, start)

    def finish(self, item: Any, tile: Any, tokens: int) -> None:
        """Puts a tile's results where they are copied from."""
        plan, state, rows = self.plan, self.state, tokens * self.plan.group
        which = pl.ds(tile * plan.tile, tokens)
        for head in range(plan.kv_heads):
            total = state.total[tile, head, :rows]
            nothing = total == 0.0
            output = state.mixed[tile, head, :rows] / jnp.where(nothing, 1.0, total)
            buffer = self.outputs[0].buffer
            output = output.astype(buffer.dtype).reshape(tokens, plan.group, plan.v_width)
            buffer[item & 1, which, head] = output
            if len(self.outputs) > 1:
                lse = (state.largest[tile, head, :rows] + jnp.log2(total)) * math.log(2)
                lse = jnp.where(nothing, -jnp.inf, lse)
                # From a column to a row a token: the diagonal of a square that repeats it.
                shape = (rows, plan.group)
                own = lax.rem(lax.broadcasted_iota(jnp.int32, shape, 0), plan.group)
                diagonal = own == lax.broadcasted_iota(jnp.int32, shape, 1)
                square = jnp.where(diagonal, lse, 0.0).reshape(tokens, plan.group, plan.group)
                self.outputs[1].buffer[item & 1, which, head] = jnp.sum(square, axis=1)

    def await_written(self, item: Any) -> None:
        """Waits until an item's results are written."""

        def wait(token: Any) -> None:
            for copy in self.output_copies(item, token):
                copy.wait()

        self.each_token(item, wait)

    def output_copies(self, item: Any, token: Any) -> Iterator[Any]:
        slot = item & 1
        for output in self.outputs:
            yield pltpu.make_async_copy(
                output.buffer.at[slot, token],
                output.outside.at[self.items.first[item] + token],
                self.written.at[slot],
            )


def _converted(stored: Array, dtype: Any) -> Array:
    """Keys or values as the products take them; bits of FP8 are uint8."""
    if stored.dtype == jnp.uint8:
        stored = lax.bitcast_convert_type(stored, jnp.float8_e4m3fn)
    return stored.astype(dtype)


def _product(left: Array, right: Array, axis: int) -> Array:
    """left · right (axis 0 of `right` is summed over) or left · rightᵀ (axis 1), FP32."""
    return lax.dot_general(
        left,
        right,
        (((1,), (axis,)), ((), ())),
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if left.dtype == jnp.float32 else None,
    )
