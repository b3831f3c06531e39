"""The body of the Mosaic TPU kernel for decode steps whose sequences have one block of keys each:
windows, chosen rows, few compressed rows, short contexts.

Called by `mosaic_tpu.py`; `mosaic_tpu_kernel.py` has the body for several blocks. Here a round
takes several neighbouring tokens (`Sizes.together`): it scores some and mixes as many before them.
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
from jaxtyping import Array

from pallas_kernels.attention.mosaic_tpu_fetch import Producer
from pallas_kernels.attention.mosaic_tpu_kernel import LOWEST, Kernel, Mask, Weights
from pallas_kernels.attention.write_tpu import LANES

FEW_PAGES = 4
"""Most pages of a block of which each is fetched, or not, without a branch."""


class ShortKernel(Kernel):
    """The body of the kernel. Item i is token i, and padding an item without pages. It has the
    buffers of i modulo their number. Two rounds are scored and mixed while others are in flight."""

    def run(self) -> None:
        """Attends from all items."""
        each = self.plan.together
        rounds = lax.div(self.total[0] + (each - 1), each)
        ahead = self.plan.buffers // each - 2
        lax.fori_loop(0, jnp.minimum(ahead, rounds), lambda number, carry: self.fetch(number), None)
        lax.fori_loop(0, rounds + 1, lambda number, carry: self.a_round(number, rounds), None)
        for before in (2, 1):
            number = rounds - before
            pl.when(number >= 0)(functools.partial(self.await_results, number))
        pl.when(rounds * each < self.items.first.shape[0])(self.write_padding)

    def a_round(self, number: Any, rounds: Any) -> None:
        """Scores the items of a round, and mixes and writes those of the round before."""
        plan, each = self.plan, self.plan.together
        ahead = number + (plan.buffers // each - 2)
        pl.when(ahead < rounds)(functools.partial(self.fetch, ahead))
        pl.when(number < rounds)(functools.partial(self.receive, number))
        # The results of two rounds ago leave from the buffers that this round fills.
        pl.when(number >= 3)(functools.partial(self.await_results, number - 3))
        # The first round mixes and the last one scores what does not exist, and nobody reads that.
        # The matrix units multiply in the order of the program: the scores of this round keep them
        # busy while the results of the round before are divided and stored.
        chains = [(index, head) for index in range(each) for head in range(plan.kv_heads)]
        now, before = (
            [self.place_of(at * each + index) for index in range(each)]
            for at in (number, number - 1)
        )
        weighed = [self.weigh_one(*chain, *before[chain[0]][1:]) for chain in chains]
        for (index, head), (largest, total, weights) in zip(chains, weighed, strict=True):
            item, slot, mask = before[index]
            mixed = self.weighted(weights, head, slot, mask)
            self.put((item & (2 * each - 1), slice(0, 1), head), largest[:, :1], total, mixed)
        for index, head in chains:
            item, slot, mask = now[index]
            self.store((index, head), self.scores(item, 0, 1, head, slot, mask))
        pl.when(number > 0)(functools.partial(self.send, number - 1))

    def weigh_one(
        self, index: int, head: int, slot: Any, mask: Mask
    ) -> tuple[Array, Array, list[Weights]]:
        """Returns the maxima of scores, and as `weights`."""
        at = index, head, slice(self.plan.group)
        largest = self.state.largest_of_block[at]
        if largest.shape[1] > 1:
            largest = jnp.concatenate([largest] * (self.plan.block // LANES), axis=1)
        return largest, *self.weights(at, largest, slot, mask)

    def store(self, at: tuple[Any, ...], scores: Any) -> None:
        """Stores the scores of a head, and the row maxima in every lane: a column would have to be
        spread when it is loaded."""
        self.state.scores[at] = scores
        largest = jnp.maximum(jnp.max(scores, axis=1, keepdims=True), LOWEST)
        place = self.state.largest_of_block.at[at]
        place[...] = jnp.broadcast_to(largest, place.shape)

    def place_of(self, item: Any) -> tuple[Any, Any, Mask]:
        """Returns an item, its slot and its mask; another item's mask if it does not exist."""
        known = jnp.clip(item, 0, self.items.first.shape[0] - 1)
        return item, item & (self.plan.buffers - 1), Mask(known, self.items.place[known])

    def fetch(self, number: Any) -> None:
        """Starts the copies of the queries and the pages of a round."""
        self.queries_of(number).start()
        for item, producer in self.producers(number):

            def part(first: Any, count: int, producer: Producer = producer) -> None:
                for index in range(count):
                    self.fetcher.fetch_page(producer, first + index)

            self.in_parts(self.items.pages[item], part)

    def receive(self, number: Any) -> None:
        """Waits for the copies of the queries and the pages of a round."""
        self.queries_of(number).wait()
        size = self.plan.page_size
        for item, _ in self.producers(number):
            slot = item & (self.plan.buffers - 1)

            def part(first: Any, count: int, slot: Any = slot) -> None:
                rows = pl.ds(pl.multiple_of(first * size, size), count * size)
                for pool in self.pools:
                    end = (slice(None), rows) if pool.swapped else (rows,)
                    theirs = [pool.buffer.at[(slot, slice(None), *end)]]
                    if pool.scales is not None:
                        theirs.append(pool.scale_buffer.at[slot, pl.ds(first, count)])
                    for there in theirs:
                        arrived = self.fetcher.arrived.at[slot]
                        pltpu.make_async_copy(there, there, arrived).wait()

            self.in_parts(self.items.pages[item], part)

    def producers(self, number: Any) -> Iterator[tuple[Any, Producer]]:
        """Yields the items of a round, which all exist."""
        for index in range(self.plan.together):
            item = number * self.plan.together + index
            yield item, Producer(item, self.items.row[item], self.items.pages[item], item)

    def in_parts(self, pages: Any, do: Callable[[Any, int], None]) -> None:
        """Calls do(first, count) for parts of some pages. Single ones are executed with a
        predicate, in place of a loop of 20 instructions a page; more are parts of powers of two."""
        most = self.plan.pages_per_block
        if most <= FEW_PAGES:
            for index in range(most):
                pl.when(index < pages)(functools.partial(do, index, 1))
            return
        count = 1 << (most.bit_length() - 1)
        while count:
            first = pages & ~(2 * count - 1)
            pl.when((pages & count) != 0)(functools.partial(do, first, count))
            count //= 2

    def queries_of(self, number: Any) -> Any:
        """Returns the copy of the queries of a round."""
        each, queries = self.plan.together, self.fetcher.queries
        first = pl.multiple_of(number * each, each)
        slot = pl.multiple_of(first & (self.plan.buffers - 1), each)
        return pltpu.make_async_copy(
            queries.outside.at[pl.ds(first, each)],
            queries.buffer.at[pl.ds(slot, each), 0],
            self.fetcher.query_arrived.at[slot],
        )

    def send(self, number: Any) -> None:
        """Starts the copies of the results of a round."""
        for copy in self.results(number):
            copy.start()

    def await_results(self, number: Any) -> None:
        """Waits until the results of a round are written."""
        for copy in self.results(number):
            copy.wait()

    def results(self, number: Any) -> Iterator[Any]:
        """Yields the copies of the results of a round."""
        each = self.plan.together
        first = pl.multiple_of(number * each, each)
        slot = pl.multiple_of(first & (2 * each - 1), each)
        for output in self.outputs:
            yield pltpu.make_async_copy(
                output.buffer.at[pl.ds(slot, each), 0],
                output.outside.at[pl.ds(first, each)],
                self.written.at[slot],
            )
