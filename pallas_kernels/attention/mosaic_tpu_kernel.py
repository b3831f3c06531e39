"""The body of the Mosaic TPU kernel of paged attention.

Called by `mosaic_tpu.py`, which explains the algorithm, lays out its memory and cuts the batch;
`mosaic_tpu_fetch.py` copies the data. Knows refs only; their shapes are given in comments.
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

from pallas_kernels.attention.mosaic_tpu_fetch import (
    AHEAD,
    Copied,
    Fetcher,
    Pool,
    Producer,
    Sizes,
    each_token,
)

PRODUCT_TOKENS = 512
"""Positions whose probabilities share a scale, of a row, in INT8; fewer take more bundles."""

LOWEST = -1e30
"""Initial running maximum; finite, to avoid inf − inf."""

TINY = 1e-30
"""Least largest magnitude of a row that is rounded to INT8, to avoid 0 / 0."""


class State(NamedTuple):
    """Running state of the current item, in VMEM; [tiles, kv_heads, rows, ...] each."""

    scores: Any  # scores of the block that is mixed next
    largest_of_block: Any = None
    largest: Any = None
    total: Any = None
    mixed: Any = None


class Mask(NamedTuple):
    """Masks a block that some query sees only partially."""

    item: Any
    base: Any
    """Position of the block's first token."""


Weights = tuple[slice, Array, Array | None]
"""Positions, their weights [rows, positions], and in INT8 the scales of the rows."""


class Weighed(NamedTuple):
    """Weights of the positions of a block, of one tile and head."""

    at: tuple[Any, ...]
    """Index of the tile, head and rows in `State`."""
    fade: Array
    """Factor of the sums so far, [rows, 1]."""
    weights: list[Weights]


class Kernel:
    """The body of the kernel."""

    def __init__(
        self,
        plan: Sizes,
        fetcher: Fetcher,
        padding: Any,
        outputs: list[Copied],
        state: State,
        ordered: Any,  # [tiles, kv_heads, rows, head_dim] queries of the item, if rows are compact
        written: Any,
    ):
        self.plan, self.fetcher, self.padding = plan, fetcher, padding
        self.items, self.total = fetcher.items, fetcher.total
        self.queries, pools = fetcher.queries, fetcher.pools
        self.pools, self.outputs, self.state = pools, outputs, state
        self.ordered, self.written = ordered, written
        # The pools that make a key, with the columns of a query that meet them.
        self.keys = [(pools[0], slice(None))]
        if plan.rope_dim:
            latent = plan.head_dim - plan.rope_dim
            self.keys = [(pools[1], slice(latent)), (pools[0], slice(latent, plan.head_dim))]

    def run(self) -> None:
        """Processes the items in order."""
        producer = self.fetcher.first()
        for _ in range(AHEAD):
            producer = self.fetcher.fetch(producer)
        pl.when(self.padding[0] > 0)(self.write_padding)
        lax.fori_loop(0, self.total[0], self.attend, (jnp.int32(0), producer))
        # `write` waits for the item before last, so two are left. The kernel must not end with
        # copies under way, nor leave counts on a semaphore that the next call finds.
        for before in (2, 1):
            pl.when(self.total[0] >= before)(
                functools.partial(self.await_written, self.total[0] - before)
            )

    # Attending

    def attend(self, item: Any, carry: tuple[Any, Producer]) -> tuple[Any, Producer]:
        """Attends from one item: a round for each of its blocks, and a last one to mix."""
        plan, items, state = self.plan, self.items, self.state
        self.fetcher.await_queries(item)
        if plan.compact:
            self.each_tile(item, functools.partial(self.order, item))
        state.largest[...] = jnp.full_like(state.largest, LOWEST)
        state.total[...] = jnp.zeros_like(state.total)
        state.mixed[...] = jnp.zeros_like(state.mixed)
        pages, place, last = items.pages[item], items.place[item], items.length[item] - 1
        blocks = lax.div(pages + (plan.pages_per_block - 1), plan.pages_per_block)
        # Positions of the item's first and last query.
        first = last - (items.count[item] - 1) * items.stride[item]
        # Blocks that every query sees entirely.
        clear_to = lax.div(jnp.maximum(first + 1 - place, 0), plan.block)
        clear_from = jnp.int32(0)
        if plan.window:
            hidden = jnp.maximum(last + 1 - plan.window - place, 0)
            clear_from = lax.div(hidden + (plan.block - 1), plan.block)

        def a_round(number: Any, carry: tuple[Any, Producer]) -> tuple[Any, Producer]:
            # One round: score block `number` (if there is one) and mix the block before it.
            step, producer = carry
            slot, before = (at & (plan.buffers - 1) for at in (step, step - 1))
            base = place + number * plan.block
            scores = number < blocks
            there = scores & (producer.item < self.total[0])
            # This block and the one before hold nothing to mask, and a whole block is to fetch.
            steady = (number > clear_from) & (number < clear_to)
            steady &= there & (producer.left >= plan.pages_per_block)

            # One set of scores a tile and head: `score` overwrites what `weigh` reads, here and in
            # the order of `mix` and `score` below.
            def both(tile: Any, tokens: int) -> None:
                # The matrix units multiply in the order of the program: what `score` gives them
                # hides the exponentials of `weigh`, on which the products of `mix` wait.
                for head in range(plan.kv_heads):
                    weighed = self.weigh(tile, tokens, head, before, None)
                    self.score(item, tile, tokens, head, slot, None)
                    self.mix(weighed, before, None)

            def steadily() -> None:
                self.fetcher.fetch_first_queries(producer)
                self.fetcher.await_block(slot)
                self.each_tile(item, both, lambda: self.fetcher.fetch_block(producer))

            def receive() -> None:
                self.fetcher.fetch(producer)
                ready = jnp.minimum(pages - number * plan.pages_per_block, plan.pages_per_block)
                self.fetcher.await_pages(slot, ready)

            def mix(tile: Any, tokens: int) -> None:
                mask = Mask(item, base - plan.block)
                for head in range(plan.kv_heads):
                    self.mix(self.weigh(tile, tokens, head, before, mask), before, mask)

            def score(tile: Any, tokens: int) -> None:
                for head in range(plan.kv_heads):
                    self.score(item, tile, tokens, head, slot, Mask(item, base))

            # The common case has no branches inside, so that its two chains overlap. All others:
            # partial blocks, masks, the first and the last round.
            pl.when(steady)(steadily)
            other = jnp.logical_not(steady)
            pl.when(other & scores)(receive)
            pl.when(other & (number > 0))(lambda: self.each_tile(item, mix))
            pl.when(other & scores)(lambda: self.each_tile(item, score))
            return jnp.where(scores, step + 1, step), self.fetcher.advance(producer, there)

        step, producer = lax.fori_loop(0, blocks + 1, a_round, carry)
        self.write(item)
        return step, producer

    def each_tile(
        self,
        item: Any,
        do: Callable[[Any, int], None],
        beside: Callable[[], None] = lambda: None,
    ) -> None:
        """Calls do(number, tokens) for each of an item's tiles, and `beside` once."""
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

    def order(self, item: Any, tile: Any, tokens: int) -> None:
        """Stores a tile's queries by heads, then by tokens."""
        plan, slot = self.plan, item & (self.plan.buffers - 1)
        which = pl.ds(tile * plan.tile, tokens)
        for head in range(plan.kv_heads):
            for index in range(plan.group):
                queries = self.queries.buffer[slot, which, head * plan.group + index]
                rows = slice(index * tokens, (index + 1) * tokens)
                self.ordered[tile, head, rows] = queries.astype(plan.query_dtype)

    def score(
        self, item: Any, tile: Any, tokens: int, head: int, slot: Any, mask: "Mask | None"
    ) -> None:
        """Stores the scores of a tile against the block in a slot, and the row maxima."""
        scores = self.scores(item, tile, tokens, head, slot, mask)
        at = tile, head, slice(len(scores))
        self.state.scores[at] = scores
        self.state.largest_of_block[at] = jnp.max(scores, axis=1, keepdims=True)

    def scores(
        self, item: Any, tile: Any, tokens: int, head: int, slot: Any, mask: "Mask | None"
    ) -> Array:
        """Returns the scores of a tile against the block in a slot."""
        plan, rows = self.plan, tokens * self.plan.group
        if plan.compact:
            queries = self.ordered[tile, head, :rows]
        else:
            which = pl.ds(tile * plan.tile, tokens)
            queries = self.queries.buffer[item & (plan.buffers - 1), which, head]
            queries = queries.reshape(rows, plan.head_dim)
        scores: Any = None  # [rows, block]
        for pool, columns in self.keys:
            part, keys = queries[:, columns], pool.buffer[slot, head]
            tokens_axis = 0 if pool.swapped else 1
            if plan.int8_products and pool.scales is not None:
                whole, row_scales = _rounded(part.astype(jnp.float32), jnp.abs)
                part = product(whole, keys, tokens_axis).astype(jnp.float32) * row_scales
            else:
                part = product(part.astype(plan.dtype), operand(keys, plan.dtype), tokens_axis)
            if pool.scales is not None:
                part *= self.scale_row(pool, slot, head) * plan.scale
            else:
                part *= plan.scale
            scores = part if scores is None else scores + part
        if mask is not None:
            scores = jnp.where(self.visible(mask, tile, rows), scores, -jnp.inf)
        return scores

    def weigh(self, tile: Any, tokens: int, head: int, slot: Any, mask: "Mask | None") -> "Weighed":
        """Returns the weights of the block in a slot, and adds them to a tile's running totals."""
        plan, state = self.plan, self.state
        at = (tile, head, slice(tokens * plan.group))
        # Online softmax: when the running maximum grows, the sums so far are rescaled by `fade`.
        before = state.largest[at]
        largest = jnp.maximum(before, state.largest_of_block[at])
        fade = jnp.exp2(before - largest)
        state.largest[at] = largest
        total, weights = self.weights(state.scores[at], largest, head, slot, mask)
        state.total[at] = state.total[at] * fade + total
        return Weighed(at, fade, weights)

    def weights(
        self, scores: Array, largest: Array, head: int, slot: Any, mask: "Mask | None"
    ) -> tuple[Array, list["Weights"]]:
        """Returns the sums [rows, 1] of the weights of a head's scores, and these weights times
        the scales of the values."""
        plan = self.plan
        scales = None  # [1, block]
        if self.pools[-1].scales is not None:
            scales = self.scale_row(self.pools[-1], slot, head)
            if mask is not None:
                scales = jnp.where(self.seen(mask, scales.shape, 1), scales, 0.0)
        total = jnp.zeros_like(largest)
        weights: list[Weights] = []
        step = PRODUCT_TOKENS if plan.int8_products else plan.block
        for start in range(0, plan.block, step):
            some = slice(start, min(start + step, plan.block))
            part = jnp.exp2(scores[:, some] - largest)
            total += jnp.sum(part, axis=1, keepdims=True)
            if scales is not None:
                part *= scales[:, some]
            if plan.int8_products:
                weights.append((some, *_rounded(part)))
            else:
                weights.append((some, part.astype(plan.dtype), None))
        return total, weights

    def mix(self, weighed: "Weighed", slot: Any, mask: "Mask | None") -> None:
        """Adds the weighted values of the block in a slot to a tile's running sums."""
        at = weighed.at
        mixed = self.state.mixed[at] * weighed.fade  # [rows, v_width]
        self.state.mixed[at] = mixed + self.weighted(weighed.weights, at[1], slot, mask)

    def weighted(
        self, weights_of: list["Weights"], head: int, slot: Any, mask: "Mask | None"
    ) -> Array:
        """Returns the sums of the weighted values of the block in a slot, [rows, v_width]."""
        plan, pool = self.plan, self.pools[-1]
        tokens_axis = 1 if pool.swapped else 0
        mixed: Any = 0.0
        for some, weights, row_scales in weights_of:
            which = (some, slice(plan.v_width))
            values = pool.buffer[(slot, head, *(which[::-1] if pool.swapped else which))]
            if row_scales is not None:  # INT8, in which unseen positions cannot be NaN
                mixed += product(weights, values, tokens_axis).astype(jnp.float32) * row_scales
                continue
            values = operand(values, plan.dtype)
            if mask is not None:
                seen = self.seen(mask, values.shape, tokens_axis, plan.mask_dtype)
                values = jnp.where(seen, values.astype(plan.dtype), jnp.zeros((), plan.dtype))
            mixed += product(weights, values, tokens_axis)
        return mixed

    def scale_row(self, pool: Pool, slot: Any, head: int) -> Array:
        """Returns the scales of a block, [1, block]."""
        pages = [
            pool.scale_buffer[slot, page, pl.ds(head, 1)]
            for page in range(self.plan.pages_per_block)
        ]
        return jnp.concatenate(pages, axis=1)

    def visible(self, mask: "Mask", tile: Any, rows: int) -> Array:
        """Returns which query sees which position of a block, [rows, block]."""
        items, shape = self.items, (rows, self.plan.block)
        if self.plan.item_tokens == 1:
            return jnp.broadcast_to(self.seen(mask, (1, self.plan.block), 1), shape)
        place = mask.base + lax.broadcasted_iota(jnp.int32, shape, 1)
        row = lax.broadcasted_iota(jnp.int32, shape, 0)
        if self.plan.compact:
            token = lax.rem(row, rows // self.plan.group)
        else:
            token = lax.div(row, self.plan.group)
        after = items.count[mask.item] - 1 - tile * self.plan.tile - token
        own = items.length[mask.item] - 1 - after * items.stride[mask.item]
        visible = place <= own
        return visible & (place > own - self.plan.window) if self.plan.window else visible

    def seen(
        self, mask: "Mask", shape: tuple[int, ...], axis: int, dtype: Any = jnp.int32
    ) -> Array:
        """Returns which positions of a block some query of the item sees; others may hold NaN.
        Positions are compared in `dtype`."""

        def bound(place: Any) -> Any:
            return jnp.clip(place - mask.base, -1, self.plan.block).astype(dtype)

        place = lax.broadcasted_iota(dtype, shape, axis)
        last = self.items.length[mask.item] - 1
        if not self.plan.window:
            return place <= bound(last)
        first = last - (self.items.count[mask.item] - 1) * self.items.stride[mask.item]
        return (place <= bound(last)) & (place > bound(first - self.plan.window))

    # Writing

    def write_padding(self) -> None:
        """Writes the results of padding tokens: zeros, and -inf."""
        for output, nothing in zip(self.outputs, (0.0, -jnp.inf), strict=False):
            place = output.buffer.at[0, 0]
            place[...] = jnp.full(place.shape, nothing, place.dtype)

        def each(do: Callable[[Any], None]) -> None:
            def token(number: Any, carry: None) -> None:
                for output in self.outputs:
                    where = self.items.first[self.total[0] + number]
                    do(
                        pltpu.make_async_copy(
                            output.buffer.at[0, 0], output.outside.at[where], self.written.at[0]
                        )
                    )

            lax.fori_loop(0, self.padding[0], token, None)

        # All copies read one row of the first results' buffer, and are waited for before `finish`
        # fills it.
        each(lambda copy: copy.start())
        each(lambda copy: copy.wait())

    def write(self, item: Any) -> None:
        """Divides by the totals, and starts the copies of an item's results."""
        # Two buffers take turns. Until the results of the item before last have left theirs,
        # `finish` would overwrite rows that are still being copied. A semaphore each: it counts
        # bytes, and could not tell one item's from the other's.
        pl.when(item >= 2)(lambda: self.await_written(item - 2))
        self.each_tile(item, functools.partial(self.finish, item))

        def start(token: Any) -> None:
            for copy in self.output_copies(item, token):
                copy.start()

        each_token(self.items, item, start)

    def finish(self, item: Any, tile: Any, tokens: int) -> None:
        """Stores a tile's results in the buffer from which they are copied to HBM."""
        plan, state, rows = self.plan, self.state, tokens * self.plan.group
        which = pl.ds(tile * plan.tile, tokens)
        if plan.compact:
            self.finish_compact(item, tile, tokens)
            return
        for head in range(plan.kv_heads):
            of = (state.largest, state.total, state.mixed)
            self.put((item & 1, which, head), *(array[tile, head, :rows] for array in of))

    def put(self, place: tuple[Any, ...], largest: Array, total: Array, mixed: Array) -> None:
        """Stores the results of a head's rows at a place of the buffers."""
        group, rows, buffer = self.plan.group, len(mixed), self.outputs[0].buffer
        output, lse = finished(largest, total, mixed)
        buffer[place] = output.astype(buffer.dtype).reshape(-1, group, self.plan.v_width)
        if len(self.outputs) > 1:
            # From a column to a row a token: the diagonal of a square that repeats it.
            own = lax.rem(lax.broadcasted_iota(jnp.int32, (rows, group), 0), group)
            diagonal = own == lax.broadcasted_iota(jnp.int32, (rows, group), 1)
            square = jnp.where(diagonal, lse, 0.0).reshape(-1, group, group)
            self.outputs[1].buffer[place] = jnp.sum(square, axis=1)

    def finish_compact(self, item: Any, tile: Any, tokens: int) -> None:
        """`finish` where rows are ordered by heads, then by tokens."""
        plan, state, rows = self.plan, self.state, tokens * self.plan.group
        which = pl.ds(tile * plan.tile, tokens)
        # [tokens, q_heads]
        lane = lax.broadcasted_iota(jnp.int32, (tokens, plan.kv_heads * plan.group), 1)
        every_lse = jnp.zeros(lane.shape, jnp.float32)
        for head in range(plan.kv_heads):
            of = (state.largest, state.total, state.mixed)
            output, lse = finished(*(array[tile, head, :rows] for array in of))
            for index in range(plan.group):
                part, q_head = (
                    slice(index * tokens, (index + 1) * tokens),
                    head * plan.group + index,
                )
                self.outputs[0].buffer[item & 1, which, q_head] = output[part]
                every_lse = jnp.where(lane == q_head, lse[part], every_lse)
        if len(self.outputs) > 1:
            self.outputs[1].buffer[item & 1, which, 0] = every_lse

    def await_written(self, item: Any) -> None:
        """Waits until an item's results are written."""

        def wait(token: Any) -> None:
            for copy in self.output_copies(item, token):
                copy.wait()

        each_token(self.items, item, wait)

    def output_copies(self, item: Any, token: Any) -> Iterator[Any]:
        slot = item & 1
        for output in self.outputs:
            yield pltpu.make_async_copy(
                output.buffer.at[slot, token],
                output.outside.at[self.items.first[item] + token],
                self.written.at[slot],
            )


def finished(largest: Array, total: Array, mixed: Array) -> tuple[Array, Array]:
    """Returns results and log-sum-exps of rows, of which some have seen nothing."""
    nothing = total == 0.0
    lse = jnp.where(nothing, -jnp.inf, (largest + jnp.log2(total)) * math.log(2))
    return mixed / jnp.where(nothing, 1.0, total), lse


def _rounded(
    rows: Array, magnitude: Callable[[Array], Array] = lambda rows: rows
) -> tuple[Array, Array]:
    """Returns rows in INT8, and the scale of each, FP32 [rows, 1]."""
    largest = jnp.maximum(jnp.max(magnitude(rows), axis=1, keepdims=True), TINY)
    whole = jnp.round(rows * (127 / largest))
    return whole.astype(jnp.int32).astype(jnp.int8), largest * (1 / 127)


def operand(stored: Array, dtype: Any) -> Array:
    """Returns keys or values as a product with rows of `dtype` takes them. FP8, which is stored as
    its bits, uint8, needs no conversion beside BF16: the matrix units of v7x take both."""
    if stored.dtype == jnp.uint8:
        stored = lax.bitcast_convert_type(stored, jnp.float8_e4m3fn)
    if stored.dtype == jnp.float8_e4m3fn and dtype == jnp.bfloat16:
        return stored
    return stored.astype(dtype)


def product(left: Array, right: Array, axis: int) -> Array:
    """Returns left · right (axis 0 of `right` is summed over) or left · rightᵀ (axis 1), in FP32;
    INT8 in INT32."""
    return lax.dot_general(
        left,
        right,
        (((1,), (axis,)), ((), ())),
        preferred_element_type=jnp.int32 if left.dtype == jnp.int8 else jnp.float32,
        precision=lax.Precision.HIGHEST if left.dtype == jnp.float32 else None,
    )
