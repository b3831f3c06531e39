"""The body of the Mosaic TPU kernel for decode steps whose sequences have one block of keys each:
windows, chosen rows, few compressed rows, short contexts.

Called by `mosaic_tpu.py`; `mosaic_tpu_kernel.py` has the body for several blocks. Here a round
takes several neighbouring tokens (`Sizes.together`): it mixes some and scores as many behind them.
Their chains of instructions are independent and lie in one stretch without branches, so that the
compiler hides the latencies of one behind the others. Every block is masked, since few are full.
Knows refs only.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention.mosaic_tpu_kernel import LOWEST, Kernel, Mask


class ShortKernel(Kernel):
    """The body of the kernel. Item i is token i, and padding an item without pages. It has the
    buffers of i modulo their number. Two rounds are scored and mixed while others are in flight."""

    def run(self) -> None:
        """Attends from all items."""
        each = self.plan.together
        rounds = lax.div(self.total[0] + (each - 1), each)
        ahead = self.plan.buffers // each - 2
        rest = jnp.maximum(rounds - ahead, 0)
        lax.fori_loop(0, rounds - rest, lambda number, carry: self.fetch(number), None)
        lax.fori_loop(0, rest, lambda number, carry: self.a_round(number, rounds, ahead), None)
        # A loop of its own, so that the one above starts its copies without a branch.
        lax.fori_loop(rest, rounds + 1, lambda number, carry: self.a_round(number, rounds), None)
        for before in (2, 1):
            number = rounds - before
            pl.when(number >= 0)(functools.partial(self.await_results, number))
        pl.when(rounds * each < self.items.first.shape[0])(self.write_padding)

    def a_round(self, number: Any, rounds: Any, ahead: int = 0) -> None:
        """Mixes and writes the items of the round before, and scores the items of this round. Where
        `ahead` is not 0, also fetches round `number + ahead`."""
        plan, each = self.plan, self.plan.together
        pl.when(number < rounds)(functools.partial(self.receive, number))
        # The results of two rounds ago leave from the buffers that this round fills.
        pl.when(number >= 3)(functools.partial(self.await_results, number - 3))
        # The first round mixes and the last one scores what does not exist, and nobody reads that.
        chains = [(index, head) for index in range(each) for head in range(plan.kv_heads)]
        now, before = (
            [self.place_of(at * each + index) for index in range(each)]
            for at in (number, number - 1)
        )
        # The matrix units multiply in the order of the program, and push the keys, which they
        # transpose, three times as slowly while lanes are reduced. So maxima and sums are taken
        # beside the products with the values, and not beside the scores.
        for index, head in chains:
            item, slot, mask = before[index]
            scores = self.state.scores[index, head]
            largest = jnp.maximum(jnp.max(scores, axis=1, keepdims=True), LOWEST)
            total, weights = self.weights(scores, largest, head, slot, mask)
            mixed = self.weighted(weights, head, slot, mask)
            self.put((item & (2 * each - 1), slice(0, 1), head), largest, total, mixed)
        for index, head in chains:
            item, slot, mask = now[index]
            self.state.scores[index, head] = self.scores(item, 0, 1, head, slot, mask)
        if ahead:
            self.fetch(number + ahead)

        @pl.when(number > 0)
        def send() -> None:
            for copy in self.results(number - 1):
                copy.start()

    def place_of(self, item: Any) -> tuple[Any, Any, Mask]:
        """Returns an item, its slot and its mask; another item's mask if it does not exist."""
        known = jnp.clip(item, 0, self.items.first.shape[0] - 1)
        return item, item & (self.plan.buffers - 1), Mask(known, self.items.place[known])

    def fetch(self, number: Any) -> None:
        """Starts the copies of the queries and the pages of a round."""
        self.queries_of(number).start()
        if self.plan.neighbours:
            self.fetch_neighbours(number)
            return
        for index in range(self.plan.together):
            item = number * self.plan.together + index
            self.in_parts(self.items.pages[item], functools.partial(self.fetch_part, item))

    def fetch_neighbours(self, number: Any) -> None:
        """Starts one copy of the pages of a round, each of which is a block."""
        each, slot = self.plan.together, self.first_of(number, self.plan.buffers)
        pages, slots = pl.ds(pl.multiple_of(number * each, each), each), pl.ds(slot, each)
        copies = [(pool.pages, pool.buffer.at[slots]) for pool in self.pools]
        for pool in self.pools:
            if pool.scales is not None:
                copies.append((pool.scales, pool.scale_buffer.at[slots, 0]))
        for source, there in copies:
            arrived = self.fetcher.arrival(slot)
            pltpu.make_async_copy(source.at[pages], there, arrived).start()

    def fetch_part(self, item: Any, first: Any, count: int) -> None:
        """Starts the copies of some pages of an item. Behind its last page that one comes again."""
        row, last = self.items.row[item], jnp.maximum(self.items.pages[item] - 1, 0)
        for page in range(count):
            number = self.fetcher.table[row + jnp.minimum(first + page, last)]
            slot = item & (self.plan.buffers - 1)
            for copy in self.fetcher.page_copies(number, slot, first + page):
                copy.start()

    def receive(self, number: Any) -> None:
        """Waits for the copies of the queries and the pages of a round."""
        self.queries_of(number).wait()
        each, slot = self.plan.together, self.first_of(number, self.plan.buffers)
        if self.always_whole:
            self.await_part(slot, pl.ds(slot, each), 0, self.plan.pages_per_block)
            return
        for index in range(each):
            part = functools.partial(self.await_part, slot, slot + index)
            self.in_parts(self.items.pages[number * each + index], part)

    def await_part(self, first_slot: Any, slots: Any, first: Any, count: int) -> None:
        """Waits for the copies of some pages of the items that have these slots."""
        size = self.plan.page_size
        rows = pl.ds(pl.multiple_of(first * size, size), count * size)
        for pool in self.pools:
            end = (slice(None), rows) if pool.swapped else (rows,)
            theirs = [pool.buffer.at[(slots, slice(None), *end)]]
            if pool.scales is not None:
                theirs.append(pool.scale_buffer.at[slots, pl.ds(first, count)])
            for there in theirs:
                pltpu.make_async_copy(there, there, self.fetcher.arrival(first_slot)).wait()

    @property
    def always_whole(self) -> bool:
        """Whether every page of a block is copied: sequences rarely have fewer than a window
        touches. Copies without a condition start beside the products."""
        return self.plan.window > 0 or self.plan.pages_per_block == 1

    def in_parts(self, pages: Any, do: Callable[[Any, int], None]) -> None:
        """Calls do(first, count) for a block that is always whole, or for parts of some pages whose
        lengths are powers of two."""
        most = self.plan.pages_per_block
        if self.always_whole:
            do(0, most)
            return
        count = 1 << (most.bit_length() - 1)
        while count:
            first = pages & ~(2 * count - 1)
            pl.when((pages & count) != 0)(functools.partial(do, first, count))
            count //= 2

    def first_of(self, number: Any, slots: int) -> Any:
        """Returns the slot of the first token of a round, among this number of slots."""
        each = self.plan.together
        return pl.multiple_of((number * each) & (slots - 1), each)

    def queries_of(self, number: Any) -> Any:
        """Returns the copy of the queries of a round."""
        each, queries = self.plan.together, self.fetcher.queries
        slot = self.first_of(number, self.plan.buffers)
        return pltpu.make_async_copy(
            queries.outside.at[pl.ds(pl.multiple_of(number * each, each), each)],
            queries.buffer.at[pl.ds(slot, each), 0],
            self.fetcher.query_arrived.at[slot],
        )

    def await_results(self, number: Any) -> None:
        """Waits until the results of a round are written."""
        for copy in self.results(number):
            copy.wait()

    def results(self, number: Any) -> Iterator[Any]:
        """Yields the copies of the results of a round."""
        each = self.plan.together
        slot = self.first_of(number, 2 * each)
        for output in self.outputs:
            yield pltpu.make_async_copy(
                output.buffer.at[pl.ds(slot, each), 0],
                output.outside.at[pl.ds(pl.multiple_of(number * each, each), each)],
                self.written.at[slot],
            )
