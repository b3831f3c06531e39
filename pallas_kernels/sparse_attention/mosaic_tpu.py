"""Index scores on a TPU core: choice of positions by `mosaic_tpu_select.py`, from scores that this
kernel writes.

Called by `api.py`, which has checked the arguments; `reference.py` defines the result. The batch is
cut into work items like that of `paged_attention`, whose `Fetcher` copies pages and queries. A
block of keys is multiplied once for all tokens of an item; ReLU, weights and the sum over the heads
follow in registers, so that 4 bytes of a position leave the core for the 132 or 256 that it reads.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float32, Int32

from pallas_kernels.attention.mosaic_tpu import INTERPRETER, SMEM_BYTES, item_places, page_ids
from pallas_kernels.attention.mosaic_tpu_fetch import (
    AHEAD,
    BUFFERS,
    Copied,
    Fetcher,
    Items,
    Pool,
    Producer,
    Sizes,
    each_token,
)
from pallas_kernels.attention.mosaic_tpu_kernel import operand, product
from pallas_kernels.attention.mosaic_tpu_memory import VMEM_BYTES
from pallas_kernels.attention.reference import in_parts
from pallas_kernels.attention.write_tpu import LANES
from pallas_kernels.sparse_attention.mosaic_tpu_select import STEP, select
from pallas_kernels.sparse_attention.reference import ChoiceCall
from pallas_kernels.target import Target

PART_TOKENS = 2048
"""Positions that are scored at a time, of a block that is not full or of a prompt."""

PARTS = 4
"""Most parts of a block, whose keys are fetched at a time. A decoding token scores all parts of a
full block in one stretch without branches: the products of one part run beside the sums of the part
before, and the starts of copies beside both."""

ITEM_TOKENS = 8
"""Consecutive tokens of a prompt that share the keys they read."""

TILE_TOKENS = 4
"""Tokens whose heads are rows of one product."""

COLUMNS = 256
"""Positions of one product."""

AT_ONCE = 256
"""Tokens whose scores lie in HBM at a time: 34 MB at 32K positions."""


def gap(call: ChoiceCall, target: Target) -> str:
    """Returns the property of a call that the kernel does not cover; empty: none."""
    tokens, heads, width = call.queries.shape
    page_size, dtype = call.key_pages.shape[2], call.key_pages.dtype
    rows = LANES if dtype.itemsize == 1 else 32 // dtype.itemsize
    smem = 4 * (call.page_table.size + 8 * min(tokens, AT_ONCE))
    if dtype.itemsize == 1 and dtype != jnp.int8 and "7" not in target.device_kind:
        return f"keys in {dtype}, which it does not multiply"
    if width % LANES or heads % 8:
        return f"{heads} index heads of {width} (multiples of 8 and of {LANES})"
    if page_size % rows and not target.interpret:
        return f"page_size {page_size} (a multiple of {rows})"
    if smem > SMEM_BYTES:
        return f"page_table {call.page_table.shape}, which needs larger pages"
    return ""


def choose_positions(call: ChoiceCall, top_k: int, target: Target) -> Int32[Array, "tokens chosen"]:
    """`api.choose_positions` on a TPU, if `gap` finds nothing in the call."""
    context = call.page_table.shape[1] * call.key_pages.shape[2]
    chosen, interpret = min(top_k, context), INTERPRETER if target.interpret else False
    if call.key_scales is not None:
        call = call._replace(key_scales=_in_order(call))

    def choose(some: tuple[Array, ...]) -> Array:
        queries, weights, sequence, position = some
        position = jnp.minimum(position, context - 1)
        part = ChoiceCall(queries, weights, *call[2:5], sequence, position)
        scores = _scores(part, interpret)
        return select(scores, position, chosen, interpret=interpret)

    tokens = call.queries, call.weights, call.sequence_of_token, call.position
    return in_parts(choose, tokens, AT_ONCE)


def _scores(call: ChoiceCall, interpret: Any) -> Float32[Array, "tokens context"]:
    """Runs the kernel on scales that are `_in_order`. Scores behind a token's own block are
    undefined."""
    tokens, heads, width = call.queries.shape
    page_size = call.key_pages.shape[2]
    sequences, pages_per_sequence = call.page_table.shape
    pages_per_part, pages_per_block = _pages(call)
    largest = 1 if tokens <= sequences else ITEM_TOKENS
    wide = jnp.float32 in (call.queries.dtype, call.key_pages.dtype)
    plan = Sizes(
        kv_heads=1,
        group=heads,
        compact=False,
        head_dim=width,
        rope_dim=0,
        v_width=0,
        page_size=page_size,
        pages_per_block=pages_per_block,
        tile=min(largest, TILE_TOKENS),
        item_tokens=largest,
        window=0,
        scale=1.0,
        dtype=jnp.float32 if wide else call.queries.dtype,
        query_dtype=jnp.float32,
        int8_products=False,
    )
    where = call.page_table, call.sequence_of_token, call.position
    places = item_places(where, page_size, largest=largest)
    places = *places, page_ids(call.page_table, call.key_pages)
    # The weight of a head stands beside its query, repeated: one copy brings both.
    repeated = jnp.broadcast_to(call.weights[..., None], (tokens, heads, LANES))
    looks = jnp.concatenate([call.queries.astype(jnp.float32), repeated], axis=-1)
    # A multiple of whole blocks and of the selection's steps.
    whole = math.lcm(plan.block, STEP)
    context = -(-pages_per_sequence * page_size // whole) * whole
    scales = () if call.key_scales is None else (call.key_scales,)
    vmem = pltpu.VMEM
    scratch = [
        vmem((BUFFERS, largest, *looks.shape[1:]), jnp.float32),
        vmem((BUFFERS, 1, plan.block, width), call.key_pages.dtype),
        *(vmem((BUFFERS, pages_per_block, 1, page_size), jnp.float32) for _ in scales),
        vmem((2, largest, 1, plan.block), jnp.float32),
        *(pltpu.SemaphoreType.DMA((count,)) for count in (BUFFERS, BUFFERS, BUFFERS, 2)),
    ]

    def kernel(*refs: Any) -> None:
        at = iter(refs)
        items = Items(*(next(at) for _ in Items._fields))
        total, _, table, look, keys = (next(at) for _ in range(5))
        scale = next(at) if scales else None
        written_to, buffer, key_buffer = (next(at) for _ in range(3))
        scale_buffer = next(at) if scales else None
        output, *semaphores, scaled, written = at
        pools = [Pool(keys, key_buffer, None, None, False)]
        fetcher = Fetcher(plan, items, total, table, Copied(look, buffer), pools, *semaphores)
        given = Copied(scale, scale_buffer) if scales else None
        Scorer(fetcher, given, Copied(written_to, output), pages_per_part, scaled, written).run()

    outside = pl.BlockSpec(memory_space=pltpu.HBM)
    found: Array = pl.pallas_call(
        kernel,
        name="index_scores",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(places),
            grid=(1,),
            in_specs=[outside] * (2 + len(scales)),
            out_specs=outside,
            scratch_shapes=scratch,
        ),
        out_shape=jax.ShapeDtypeStruct((tokens, 1, context), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=VMEM_BYTES, disable_bounds_checks=True
        ),
        interpret=interpret,
    )(*places, looks, call.key_pages, *scales)
    return found[:, 0]


def _pages(call: ChoiceCall) -> tuple[int, int]:
    """Returns the pages of a part, and of a block."""
    page_size, pages_per_sequence = call.key_pages.shape[2], call.page_table.shape[1]
    part = min(max(1, PART_TOKENS // page_size), pages_per_sequence)
    return part, part * min(PARTS, pl.next_power_of_2(-(-pages_per_sequence // part)))


def _in_order(call: ChoiceCall) -> Float32[Array, "places 1 page_size"]:
    """Copies the scales of all pages of the table, 4 bytes of the 132 of a position, and those of a
    block behind it. So one copy fetches the scales of a block. A copy for each page would double
    the copies that a core starts, which take as long as the products."""
    assert call.key_scales is not None
    places = jnp.pad(call.page_table.reshape(-1), (0, _pages(call)[1]))
    return call.key_scales.at[places].get(mode="clip", wrap_negative_indices=False)


Carry = tuple[Any, Producer, Any, Any]
"""Blocks scored so far, the next block to fetch, and the tokens of the last block but one, and of
the last one, whose scores are still being written."""


class Scorer:
    """The body of the kernel."""

    def __init__(
        self,
        fetcher: Fetcher,
        scales: Copied | None,  # [places, 1, page_size], [BUFFERS, pages_per_block, 1, page_size]
        output: Copied,
        pages_per_part: int,
        scaled: Any,  # [BUFFERS] semaphores of scales
        written: Any,
    ):
        self.fetcher, self.plan, self.items = fetcher, fetcher.plan, fetcher.items
        self.scales, self.output, self.pages_per_part = scales, output, pages_per_part
        self.scaled, self.written = scaled, written

    def run(self) -> None:
        """Scores the blocks of all items in order."""
        producer = self.fetcher.first()
        for _ in range(AHEAD):
            producer = self.fetch(producer)
        total = self.fetcher.total[0]
        zero = jnp.int32(0)
        step, _, *tokens = lax.fori_loop(0, total, self.item, (zero, producer, zero, zero))
        for before in (2, 1):
            self.await_written((step - before) & 1, tokens[-before])

    def item(self, item: Any, carry: Carry) -> Carry:
        """Scores the blocks of one item."""
        plan, pages = self.plan, self.items.pages[item]
        self.fetcher.await_queries(item)

        def a_block(number: Any, carry: Carry) -> Carry:
            step, producer, before_last, last = carry
            slot = step & (BUFFERS - 1)
            there = producer.item < self.fetcher.total[0]
            ready = jnp.minimum(pages - number * plan.pages_per_block, plan.pages_per_block)
            # Scores of the block before last leave from the buffer that this block fills. A wait
            # has to take off as many copies as that block started, whose item may have had another
            # number of tokens: so the carry has the numbers.
            self.await_written(step & 1, before_last)
            # The common case has no branches inside.
            steady = there & (producer.left >= plan.pages_per_block)
            steady &= (ready == plan.pages_per_block) & (plan.item_tokens == 1)

            def steadily() -> None:
                self.fetcher.fetch_first_queries(producer)
                self.fetch_scales(producer)
                self.fetcher.await_block(slot)
                self.await_scales(slot)
                for part in range(plan.pages_per_block // self.pages_per_part):
                    self.score(item, slot, step & 1, part, 0)
                self.fetcher.fetch_block(producer)

            def otherwise() -> None:
                self.fetch(producer)
                self.fetcher.await_pages(slot, ready)
                self.await_scales(slot)

                def score(part: Any, carry: None) -> None:
                    self.each_tile(item, functools.partial(self.score, item, slot, step & 1, part))

                parts = lax.div(ready + (self.pages_per_part - 1), self.pages_per_part)
                lax.fori_loop(0, parts, score, None)

            pl.when(steady)(steadily)
            pl.when(jnp.logical_not(steady))(otherwise)
            self.write(item, number, step & 1)
            return step + 1, self.fetcher.advance(producer, there), last, self.items.count[item]

        blocks = lax.div(pages + (plan.pages_per_block - 1), plan.pages_per_block)
        return lax.fori_loop(0, blocks, a_block, carry)

    def fetch(self, producer: Producer) -> Producer:
        """Starts all copies of a block."""
        pl.when(producer.item < self.fetcher.total[0])(lambda: self.fetch_scales(producer))
        return self.fetcher.fetch(producer)

    def fetch_scales(self, producer: Producer) -> None:
        """Starts the copy of a block's scales, of pages behind the item's last one too."""
        if self.scales is not None:
            self.scale_copy(self.scales, producer.row, producer.step & (BUFFERS - 1)).start()

    def await_scales(self, slot: Any) -> None:
        """Waits for the copy of a block's scales."""
        if self.scales is not None:
            self.scale_copy(self.scales, 0, slot).wait()

    def scale_copy(self, scales: Copied, row: Any, slot: Any) -> Any:
        """Returns the copy of the scales of a block that begins with this row of the table."""
        rows = scales.outside.at[pl.ds(row, self.plan.pages_per_block)]
        return pltpu.make_async_copy(rows, scales.buffer.at[slot], self.scaled.at[slot])

    def each_tile(self, item: Any, do: Callable[[Any], None]) -> None:
        """Calls `do` with the number of each tile of an item."""
        if self.plan.item_tokens == 1:
            do(0)
            return
        tiles = lax.div(self.items.count[item] + (self.plan.tile - 1), self.plan.tile)
        lax.fori_loop(0, tiles, lambda number, carry: do(number), None)

    def score(self, item: Any, slot: Any, to: Any, part: Any, tile: Any) -> None:
        """Scores a part of the block in a slot for a tile of an item's tokens."""
        plan, width, pages = self.plan, self.plan.head_dim, self.pages_per_part
        which = pl.ds(tile * plan.tile, plan.tile)
        looks = self.fetcher.queries.buffer[item & (BUFFERS - 1), which]
        weights = looks[..., width:]  # [tile, heads, LANES]
        queries = looks[..., :width].reshape(-1, width).astype(plan.dtype)
        (pool,), scales, size = self.fetcher.pools, None, pages * plan.page_size
        if self.scales is not None:
            held = [self.scales.buffer[slot, part * pages + page] for page in range(pages)]
            scales = jnp.concatenate(held, axis=1)
        for first in range(0, size, COLUMNS):
            some, place = slice(first, min(first + COLUMNS, size)), part * size + first
            if not isinstance(place, int):
                place = pl.multiple_of(place, math.gcd(size, first))
            here = pl.ds(place, some.stop - first)
            keys = operand(pool.buffer[slot, 0, here], plan.dtype)
            found = jnp.maximum(product(queries, keys, 1), 0.0)
            found = found.reshape(plan.tile, plan.group, -1)
            sums = [
                jnp.sum(columns * weights[..., : columns.shape[2]], axis=1)
                for start in range(0, found.shape[2], LANES)
                for columns in (found[..., start : start + LANES],)
            ]
            scores = jnp.concatenate(sums, axis=1)
            if scales is not None:
                scores *= scales[:, some]
            self.output.buffer[to, which, 0, here] = scores

    def write(self, item: Any, number: Any, slot: Any) -> None:
        """Starts the copies of the scores of an item's block `number`."""

        def start(token: Any) -> None:
            self.copy(slot, token, self.items.first[item] + token, number).start()

        each_token(self.items, item, start)

    def await_written(self, slot: Any, tokens: Any) -> None:
        """Waits until the scores in a slot, of this number of tokens, are written."""
        lax.fori_loop(0, tokens, lambda token, carry: self.copy(slot, token, 0, 0).wait(), None)

    def copy(self, slot: Any, token: Any, row: Any, number: Any) -> Any:
        """Returns the copy of one token's scores."""
        block = self.plan.block
        start = pl.multiple_of(number * block, block)
        return pltpu.make_async_copy(
            self.output.buffer.at[slot, token, 0],
            self.output.outside.at[row, 0, pl.ds(start, block)],
            self.written.at[slot],
        )
