"""The page pool and the slots of one DP group, over all lanes.

Used by the scheduler alone. Decides nothing: the policy is in `scheduler.py`.
"""

import heapq
from collections.abc import Iterator
from collections.abc import Sequence as Items
from typing import Literal

import numpy as np

from jaxserve.engine.lane_slots import LaneSlots
from jaxserve.engine.pages import PageAllocator, pages_for
from jaxserve.engine.prefix_cache import PageNode, PrefixCache
from jaxserve.engine.sequence import Home, Sequence


class DPGroup:
    """One DP group. Its lanes share the pool.

    Args:
      index: of the group.
      lanes: the slots of every lane, of which this group's are rows `index * slots` and on.
      pages, page_size: of the pool.
      prefix_cache: whether full pages are kept for sequences that begin alike.
      first_page: the lowest page id of the pool.
    """

    def __init__(
        self,
        index: int,
        *,
        lanes: Items[LaneSlots],
        pages: int,
        page_size: int,
        prefix_cache: bool,
        first_page: int = 0,
    ):
        self.index = index
        self.pool = PageAllocator(pages, first_page)
        self.cache = PrefixCache(self.pool, page_size) if prefix_cache else None
        self.changed = False
        """Whether pages or slots changed hands since the last check of integrity."""
        self.residents_count = 0
        """Sequences that hold a slot; counted, because every admission asks every group."""
        self.promised = 0
        """Pages that residents will still take if all reach their full length; counted, too."""
        self.held: dict[str, list[PageNode]] = {}
        """By request, pages in the prefix cache that are held for another worker to fetch."""
        self.stalled: set[Sequence] = set()
        """Residents that missed their last step for want of a page: pages go to them before those
        that are due later."""
        self._lanes = lanes
        self._slots = lanes[0].slots
        self._rows = slice(index * self._slots, (index + 1) * self._slots)
        self._free = [list(range(self._slots)) for _ in lanes]  # heaps: the lowest slot goes first
        self._page_size = page_size

    @property
    def free_pages(self) -> int:
        """Pages that no sequence uses, those of the prefix cache included."""
        return self.pool.free_pages + (self.cache.idle if self.cache else 0)

    @property
    def usage(self) -> float:
        """The part of the pool that sequences use, 0 … 1."""
        return 1 - (self.free_pages + self.pool.quarantined) / self.pool.pages

    def residents(self) -> Iterator[Sequence]:
        """Sequences that hold a slot and pages."""
        for lane in self._lanes:
            yield from (sequence for sequence in lane.sequences[self._rows] if sequence is not None)

    @property
    def full(self) -> bool:
        """Whether every slot is taken."""
        return not any(self._free)

    @property
    def leaving(self) -> bool:
        """Whether some pages come back by themselves, when steps in flight are complete."""
        return any(bool((lane.resident & ~lane.running)[self._rows].any()) for lane in self._lanes)

    def match(self, sequence: Sequence) -> list[PageNode]:
        """The longest prefix of the sequence that is in the prefix cache, as a path of pages."""
        if self.cache is None:
            return []
        return self.cache.match(sequence.keys, sequence.reusable)

    def reset_prefix_cache(self) -> int:
        """Forgets what the prefix cache has; returns the pages that are free by it."""
        self.changed = True
        return 0 if self.cache is None else self.cache.reset()

    def allocate(self, count: int) -> list[int]:
        """Takes pages of which there are enough, if need be out of the prefix cache."""
        self.changed = True
        if self.cache is not None and count > self.pool.free_pages:
            self.cache.evict(count - self.pool.free_pages)
        page_ids = self.pool.allocate(count)
        if page_ids is None:
            raise RuntimeError(f"group {self.index}: {count} pages wanted, {self.free_pages} free")
        return page_ids

    def grow(self, sequence: Sequence) -> None:
        """Gives a resident one more page."""
        lane, row = self._row(sequence)
        sequence.page_ids += self.allocate(1)
        lane.add_page(row)
        self.stalled.discard(sequence)
        self.promised -= 1

    def lane_for(self, sequence: Sequence) -> int:
        """The lane with the fewest sequences; not to be asked when full.

        Sequences with a grammar go where the fewest of their kind are, and the others leave room
        for them: a lane that waits for its grammars is slower, and lanes should finish together.
        """

        def load(lane: int) -> tuple[int, int]:
            residents = self._slots - len(self._free[lane])
            slots = self._lanes[lane]
            grammars = int((slots.grammar & slots.resident)[self._rows].sum())
            if sequence.has_grammar:
                return grammars, residents
            return residents, -grammars

        return min((lane for lane, free in enumerate(self._free) if free), key=load)

    def admit(self, sequence: Sequence, lane: int, pages: int, prefix: list[PageNode]) -> None:
        """Gives the sequence a free slot of the lane and its first pages.

        Args:
          pages: how many.
          prefix: those of them that the prefix cache has, which it shares.
        """
        slot = heapq.heappop(self._free[lane])
        sequence.home = Home(self.index, lane, slot)
        if self.cache is not None:
            self.cache.acquire(prefix)
        sequence.prefix = prefix
        sequence.page_ids = [node.page_id for node in prefix]
        sequence.page_ids += self.allocate(pages - len(prefix))
        sequence.status = "running"
        self.residents_count += 1
        self.promised += self._promised_to(sequence)
        cached = len(prefix) * self._page_size
        if sequence.found is None:
            sequence.found = min(cached, len(sequence.request.prompt))
        self._lanes[lane].take(self._rows.start + slot, sequence, cached)

    def stop(self, sequence: Sequence, status: Literal["waiting", "ended"]) -> None:
        """A resident gets no further step, because it was preempted or has ended."""
        lane, row = self._row(sequence)
        sequence.status = status
        lane.stop(row, ended=status == "ended" or sequence.suspect)
        self.stalled.discard(sequence)

    def publish(self, sequence: Sequence, cached: int) -> None:
        """Puts the sequence's full pages into the prefix cache.

        Args:
          cached: its tokens whose cache entries are written, of which the host may have dropped
            the last.
        """
        if self.cache is None or sequence.suspect:
            return
        self.changed = True
        full = min(cached, len(sequence.tokens)) // self._page_size
        for page in range(len(sequence.prefix), full):
            if not self.cache.extend(sequence.prefix, sequence.keys, sequence.page_ids[page]):
                break  # another sequence published the same text first, and uses it

    def suspect(self, sequence: Sequence) -> None:
        """The logits of a resident were no numbers: its entries are given to nobody, neither those
        that it shares."""
        sequence.suspect = self.changed = True
        if self.cache is not None and sequence.prefix:
            self.cache.condemn(sequence.prefix)

    def hold(self, sequence: Sequence) -> None:
        """Keeps the pages of the sequence's prompt in use, as far as the prefix cache has them."""
        assert self.cache is not None
        request = sequence.request
        path = self.cache.match(sequence.keys, len(request.prompt))
        self.cache.acquire(path)
        self.held[request.request_id] = path
        self.changed = True

    def let_go(self, request_id: str) -> None:
        """Releases the pages that `hold` kept in use."""
        assert self.cache is not None
        self.cache.release(self.held.pop(request_id))
        self.changed = True

    def release(self, sequence: Sequence) -> None:
        """Takes the slot and the pages back; what the prefix cache does not have is lost."""
        lane, row = self._row(sequence)
        assert sequence.home is not None
        assert lane.in_flight[row] == 0
        self.changed = True
        lane.clear(row)
        heapq.heappush(self._free[lane.lane], sequence.home.slot)
        self.residents_count -= 1
        self.promised -= self._promised_to(sequence)
        if sequence.suspect and sequence.poisoned is None:
            sequence.poisoned = _own_pages(sequence)
            self.pool.quarantine(sequence.poisoned)
        else:
            self.pool.free(_own_pages(sequence))
            if sequence.suspect and sequence.poisoned is not None:
                self.pool.absolve(sequence.poisoned)
        if self.cache is not None:
            self.cache.release(sequence.prefix)
        sequence.suspect = False
        sequence.leave_slot()

    def _row(self, sequence: Sequence) -> tuple[LaneSlots, int]:
        assert sequence.home is not None
        return self._lanes[sequence.home.lane], self._rows.start + sequence.home.slot

    def _promised_to(self, sequence: Sequence) -> int:
        return pages_for(sequence.longest_cache, self._page_size) - len(sequence.page_ids)

    def check_integrity(self) -> None:
        """Raises RuntimeError if pages or slots do not add up."""
        residents = list(self.residents())
        owned = [_own_pages(sequence) for sequence in residents]
        if self.cache is not None:
            owned.append(self.cache.page_ids())
            self.cache.check_integrity(
                [*(sequence.prefix for sequence in residents), *self.held.values()]
            )
        self.pool.check_integrity(owned)
        counted = self.residents_count, self.promised
        found = len(residents), sum(map(self._promised_to, residents))
        if counted != found:
            raise RuntimeError(
                f"group {self.index} counts {counted} residents and pages promised to them: there "
                f"are {found}"
            )
        for resident in residents:
            shared = [node.page_id for node in resident.prefix]
            if resident.page_ids[: len(shared)] != shared:
                raise RuntimeError(
                    f"request {resident.request.request_id!r} begins with pages "
                    f"{resident.page_ids[: len(shared)]}, in the prefix cache with {shared}"
                )
        for lane, slots in enumerate(self._lanes):
            for slot, sequence in enumerate(slots.sequences[self._rows]):
                if sequence is not None and sequence.home != (self.index, lane, slot):
                    raise RuntimeError(
                        f"slot {(self.index, lane, slot)} holds request "
                        f"{sequence.request.request_id!r}, whose home is {sequence.home}"
                    )
            free = np.flatnonzero(~slots.resident[self._rows]).tolist()
            if sorted(self._free[lane]) != free:
                raise RuntimeError(
                    f"group {self.index}, lane {lane}: slots {sorted(self._free[lane])} are on the "
                    f"free list, and {free} are free"
                )
        self.changed = False


def _own_pages(sequence: Sequence) -> list[int]:
    """Its pages that the prefix cache does not own."""
    return sequence.page_ids[len(sequence.prefix) :]
