"""Page pool and slots of one DP group, over all lanes, and checks that their counts add up.

Used by the scheduler alone. Decides nothing: the policy is in `scheduler.py`.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from typing import Literal, NamedTuple

import numpy as np

from jaxserve.engine.lane_slots import LaneSlots, StepInFlight
from jaxserve.engine.pages import NO_PAGE, PageAllocator, PageNode, PrefixCache, RingPool
from jaxserve.engine.sequence import Home, SchedulerSizes, Sequence
from jaxserve.roles.layout import pages_for


class HeldPages(NamedTuple):
    """Pages of a prompt that another worker will fetch, in order."""

    prefix: list[PageNode]
    """First pages, owned by the prefix cache, of which the hold is a user."""
    own: list[int]
    """Further pages, owned by the hold: the prefix cache has other pages with the same tokens, or
    was reset while the prompt ran."""
    ring: dict[int, int]
    """Pages that the next token reads in layers with a window, see `Sequence.ring`."""

    @property
    def page_ids(self) -> list[int]:
        """Page ids in the group's pool."""
        return [node.page_id for node in self.prefix] + self.own


class DPGroup:
    """One DP group. Its lanes share the pool.

    Args:
      index: number of the group.
      lanes: slots of every lane. Rows `index * slots` and following belong to this group.
    """

    def __init__(self, index: int, lanes: Items[LaneSlots], sizes: SchedulerSizes):
        self.index = index
        scratch, page_size = sizes.scratch, sizes.page_size
        self.rings: RingPool | None = None
        self.pool = PageAllocator(sizes.pages - scratch, scratch)
        spare = self.pool.pages - pages_for(sizes.max_length, page_size)
        # So that pages for a valid request can always be had.
        self.pool.most_quarantined = max(0, min(self.pool.most_quarantined, spare))
        if sizes.ring_pages:
            scratch = 0 if sizes.recurrent else scratch  # drafts write no state
            self.rings = RingPool(sizes.ring_pages - scratch, scratch, sizes.window, page_size)
        self.cache = PrefixCache(self.pool, page_size, self.rings) if sizes.prefix_cache else None
        self.changed = False
        """True if pages or slots changed hands since the last check of integrity."""
        self.residents_count = 0
        """Number of sequences with a slot. Kept up to date because every admission reads it."""
        self.promised = 0
        """Pages that residents will still take if all reach full length. Kept up to date, too."""
        self.held: dict[str, HeldPages] = {}
        """Pages held for another worker to fetch, by request id."""
        self.stalled: set[Sequence] = set()
        """Residents that lacked a page in their last step; they get pages first."""
        self._lanes = lanes
        self._slots = sizes.slots
        self._states = sizes.ring_pages // (sizes.slots * sizes.lanes) * sizes.recurrent
        """Most pages of states that a sequence needs, see `RingPool`."""
        self._rows = slice(index * self._slots, (index + 1) * self._slots)
        self._free = [list(range(self._slots)) for _ in lanes]  # heaps: the lowest slot goes first
        self._page_size = page_size
        for lane in lanes:
            lane.open_ring.append(self.open_ring if self.rings else None)

    @property
    def free_pages(self) -> int:
        """Pages that no sequence uses, idle pages of the prefix cache included."""
        return self.pool.free_pages + (self.cache.idle if self.cache else 0)

    @property
    def usage(self) -> float:
        """Fraction of the pool that sequences and holds use, 0 … 1."""
        return 1 - (self.free_pages + self.pool.quarantined) / self.pool.pages

    def residents(self) -> Iterator[Sequence]:
        """Yields the sequences that have a slot and pages."""
        for lane in self._lanes:
            yield from (sequence for sequence in lane.sequences[self._rows] if sequence is not None)

    @property
    def full(self) -> bool:
        """True if every slot is taken, or held prompts leave another sequence too few states."""
        left = self._states * (len(self._lanes) * self._slots - self.residents_count - 1)
        return not any(self._free) or (self._states > 0 and left < len(self.held))

    @property
    def leaving(self) -> bool:
        """True if pages will come back when the steps in flight are complete."""
        return any(bool((lane.resident & ~lane.running)[self._rows].any()) for lane in self._lanes)

    def match(self, sequence: Sequence) -> list[PageNode]:
        """Returns the longest prefix of the sequence in the prefix cache, as a path of pages."""
        return self.cache.match(sequence.keys, sequence.reusable) if self.cache else []

    def reset_prefix_cache(self) -> int:
        """Empties the prefix cache and returns how many pages that freed."""
        self.changed = True
        return 0 if self.cache is None else self.cache.reset()

    def allocate(self, count: int) -> list[int]:
        """Takes pages, out of the prefix cache if need be; raises RuntimeError if too few exist."""
        return self._allocated(self.pool, count, self.cache.evict if self.cache else None)

    def _allocated(
        self, pool: PageAllocator, count: int, evict: Callable[[int], None] | None
    ) -> list[int]:
        self.changed = True
        if evict is not None and count > pool.free_pages:
            evict(count - pool.free_pages)
        page_ids = pool.allocate(count)
        if page_ids is None:
            raise RuntimeError(f"group {self.index}: {count} pages wanted, {pool.free_pages} free")
        return page_ids

    def grow(self, sequence: Sequence) -> None:
        """Gives a resident one more page."""
        lane, row = self._row(sequence)
        sequence.page_ids += self.allocate(1)
        lane.room[row] += self._page_size
        self.stalled.discard(sequence)
        self.promised -= 1

    def has_slot(self, lane: int) -> bool:
        """True if a slot of the lane is free."""
        return not self.full and bool(self._free[lane])

    def lane_for(self, sequence: Sequence) -> int:
        """Returns the lane with the fewest sequences. The group must have a free slot.

        A sequence with a grammar goes to the lane with the fewest grammars, and other sequences
        leave room there: a lane that waits for grammars is slower, and lanes should finish
        together.
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
          sequence: Waits for a slot.
          lane: Has a free slot.
          pages: Number of pages, those of `prefix` included.
          prefix: Its first pages, found in the prefix cache and shared with it.
        """
        row = self._rows.start + heapq.heappop(self._free[lane])
        sequence.home = Home(self.index, lane, row)
        if self.cache is not None:
            self.cache.acquire(prefix)  # before `allocate`, which evicts pages without users
        sequence.prefix = prefix
        sequence.page_ids = [node.page_id for node in prefix]
        sequence.page_ids += self.allocate(pages - len(prefix))
        sequence.status = "running"
        self.residents_count += 1
        self.promised += self._promised_to(sequence)
        cached = len(prefix) * self._page_size
        if self.rings is not None and self.cache is not None:
            read = range(self.rings.first_read(cached), len(prefix))
            sequence.ring = {page: self.cache.read(prefix[page]) for page in read}
            sequence.ring_end = len(prefix)
        if sequence.found is None:
            sequence.found = min(cached, len(sequence.request.prompt))
        self._lanes[lane].take(row, sequence, cached)

    def stop(self, sequence: Sequence, status: Literal["waiting", "ended"]) -> None:
        """Ends a resident's steps, because it was preempted or has ended."""
        lane, row = self._row(sequence)
        sequence.status = status
        lane.stop(row, ended=status == "ended" or sequence.suspect)
        self.stalled.discard(sequence)

    def publish(self, sequence: Sequence, cached: int) -> None:
        """Puts the sequence's full pages into the prefix cache, and gives back the pages of its
        ring that no further step reads.

        Args:
          sequence: A resident.
          cached: Tokens whose cache entries are written. The host may have dropped the last ones.
        """
        if sequence.suspect:
            return
        self.changed = True
        cached = min(cached, len(sequence.tokens))
        for page in range(len(sequence.prefix), cached // self._page_size):
            own = sequence.page_ids[page], sequence.ring.get(page, -1)
            if self.cache is None or not self.cache.extend(sequence.prefix, sequence.keys, *own):
                break  # another sequence published the same tokens first, and uses that page
        if self.rings is not None:
            self._slide(sequence, self.rings.first_kept(cached))

    def open_ring(self, sequence: Sequence, end: int, start: int = 0) -> None:
        """Gives a resident ring pages up to a place among its pages, from place `start` on. The
        pool (`kv_cache.ring_pages`) is large enough that a resident never lacks one.

        Without a prefix cache a sequence has one state, which is replaced in its page.
        """
        assert self.rings is not None
        places = range(max(sequence.ring_end, start), end)
        if self.rings.states and self.cache is None and places and sequence.ring:
            page_ids, places = [*sequence.ring.values()], places[-1:]
            sequence.ring.clear()
        else:
            evict = self.cache.evict_rings if self.cache else None
            page_ids = self._allocated(self.rings, len(places), evict)
        sequence.ring.update(zip(places, page_ids, strict=True))
        sequence.ring_end = max(sequence.ring_end, end)

    def with_rings(
        self, page_ids: list[int], ring: dict[int, int], start: int = 0, missing: int = NO_PAGE
    ) -> list[int]:
        """Joins every page id with the ring's id for the same page, in the layout of `PageRun`.

        Args:
          page_ids: a sequence's pages, from place `start` on.
          missing: the id for pages that the ring does not have.
        """
        if self.rings is None:
            return page_ids
        pairs = [(page_id, ring.get(at, missing)) for at, page_id in enumerate(page_ids, start)]
        return [page_id for pair in pairs for page_id in pair]

    def _slide(self, sequence: Sequence, first: int) -> None:
        """Gives back ring pages before a place.

        The prefix cache prefers to keep those that a later sequence is likely to start behind: the
        end of the prompt, and where the tree branches.
        """
        assert self.rings is not None
        prompt, path = len(sequence.request.prompt) // self._page_size, sequence.prefix
        for page in [page for page in sequence.ring if page < first]:
            last = page + self.rings.window_pages
            branches = any(len(node.children) > 1 for node in path[page:last])
            self._close(sequence.ring, path, [page], keep=branches or page < prompt <= last)

    def cut_ring(self, sequence: Sequence, end: int) -> None:
        """Gives back a resident's ring pages from a place on."""
        self._close(sequence.ring, sequence.prefix, [p for p in sequence.ring if p >= end])
        sequence.ring_end = end

    def _close(
        self, ring: dict[int, int], path: list[PageNode], pages: Items[int], *, keep: bool = True
    ) -> None:
        for page in pages:
            page_id = ring.pop(page)
            if page < len(path) and self.cache is not None:
                self.cache.unread(path[page], keep=keep)
            elif self.rings is not None:
                self.rings.free([page_id])

    def suspect(self, sequence: Sequence) -> None:
        """Marks a resident with non-finite logits. None of its cache entries is reused."""
        sequence.suspect = self.changed = True
        if self.cache is not None and sequence.prefix:
            self.cache.condemn(sequence.prefix)

    def hold(self, sequence: Sequence) -> None:
        """Keeps the pages of a prompt in use after its sequence has left.

        The hold takes the pages that the sequence itself has, never those that a look-up in the
        prefix cache finds: the cache may lack some, or have others. It becomes one more user of
        the sequence's path in the cache and takes over the sequence's own pages.
        """
        assert self.cache is not None
        pages, shared = len(sequence.request.prompt) // self._page_size, len(sequence.prefix)
        held = HeldPages(sequence.prefix[:pages], sequence.page_ids[shared:pages], sequence.ring)
        sequence.ring = {}
        self.cache.acquire(held.prefix)
        del sequence.page_ids[shared : shared + len(held.own)]
        self.promised += len(held.own)  # as counted by `_promised_to`, until the sequence leaves
        self.held[sequence.request.request_id] = held
        self.changed = True

    def let_go(self, request_id: str) -> None:
        """Gives back the pages that `hold` kept."""
        assert self.cache is not None
        held = self.held.pop(request_id)
        self._close(held.ring, held.prefix, list(held.ring))
        self.cache.release(held.prefix)
        self.pool.free(held.own)
        self.changed = True

    def release(self, sequence: Sequence) -> None:
        """Takes back the slot and the pages. Entries outside the prefix cache are lost."""
        lane, row = self._row(sequence)
        assert lane.in_flight[row] == 0
        self.changed = True
        self._close(sequence.ring, sequence.prefix, list(sequence.ring))
        lane.clear(row)
        heapq.heappush(self._free[lane.lane], row - self._rows.start)
        self.residents_count -= 1
        self.promised -= self._promised_to(sequence)
        if sequence.suspect and sequence.poisoned is None:
            sequence.poisoned = _own_pages(sequence)
            self.pool.quarantine(sequence.poisoned)
        else:
            self.pool.free(_own_pages(sequence))
            # Its logits were not finite on other pages either: the first ones are not to blame.
            if sequence.suspect and sequence.poisoned is not None:
                self.pool.absolve(sequence.poisoned)
        if self.cache is not None:
            self.cache.release(sequence.prefix)
        sequence.suspect = False
        sequence.leave_slot()

    def _row(self, sequence: Sequence) -> tuple[LaneSlots, int]:
        return self._lanes[sequence.place.lane], sequence.place.row

    def _promised_to(self, sequence: Sequence) -> int:
        return pages_for(sequence.longest_cache, self._page_size) - len(sequence.page_ids)

    def integrity(self) -> Iterator[None]:
        """Raises RuntimeError if pages or slots do not add up; see `PageAllocator.integrity`."""
        residents = list(self.residents())
        held = list(self.held.values())
        owners: list[Sequence | HeldPages] = [*residents, *held]
        owned: list[Iterable[int]] = [*map(_own_pages, residents), *(one.own for one in held)]
        if self.cache is not None:
            owned.append(node.page_id for node in self.cache.nodes())
            nodes = [one.prefix[p] for one in owners for p in one.ring if p < len(one.prefix)]
            yield from self.cache.integrity((one.prefix for one in owners), nodes)
        yield from self.pool.integrity(owned)
        if self.rings is not None:
            rings = [one.ring[p] for one in owners for p in one.ring if p >= len(one.prefix)]
            kept = (node.ring for node in self.cache.nodes()) if self.cache else ()
            yield from self.rings.integrity([rings, (ring for ring in kept if ring >= 0)])
        counted = self.residents_count, self.promised
        found = len(residents), sum(map(self._promised_to, residents))
        if counted != found:
            raise RuntimeError(
                f"group {self.index} counts {counted} residents and pages promised to residents, "
                f"and has {found}"
            )
        for resident in residents:
            yield
            shared = [node.page_id for node in resident.prefix]
            if resident.page_ids[: len(shared)] != shared:
                raise RuntimeError(
                    f"request {resident.request.request_id!r} begins with pages "
                    f"{resident.page_ids[: len(shared)]}, in the prefix cache with {shared}"
                )
        for lane, slots in enumerate(self._lanes):
            for row, sequence in enumerate(slots.sequences[self._rows], self._rows.start):
                where = self.index, lane, row
                if sequence is not None and sequence.home != where:
                    _raise_first(sequence, {f"is in {where}, its home is {sequence.home}": True})
            free = np.flatnonzero(~slots.resident[self._rows]).tolist()
            if sorted(self._free[lane]) != free:
                raise RuntimeError(
                    f"group {self.index}, lane {lane}: slots {sorted(self._free[lane])} are on the "
                    f"free list, and {free} are free"
                )


def _own_pages(sequence: Sequence) -> list[int]:
    """Returns the pages of a sequence that the prefix cache does not own."""
    return sequence.page_ids[len(sequence.prefix) :]


def check_lanes(lanes: Items[LaneSlots], in_flight: Items[deque[StepInFlight]]) -> None:
    """Raises RuntimeError unless every row is in the steps that it is counted in."""
    for lane, steps in zip(lanes, in_flight, strict=True):
        counted = np.zeros_like(lane.in_flight)
        pending, slack = np.zeros_like(lane.pending), np.zeros_like(lane.slack)
        for step in steps:
            counted[step.rows] += 1
            pending[step.rows] += step.samples
            slack[step.rows] += 0 if step.drafts is None else step.drafts
        for row in np.flatnonzero(~lane.resident & (counted > 0)).tolist():
            raise RuntimeError(
                f"lane {lane.lane}: row {row} lost its sequence with steps in flight"
            )
        for row in np.flatnonzero(lane.resident).tolist():
            sequence = lane.write_back(row)
            problems: dict[str, object] = {
                "is counted in the wrong number of steps": counted[row] != lane.in_flight[row],
                "has the wrong number of tokens pending": pending[row] != lane.pending[row],
                "has the wrong number of drafts in flight": slack[row] != lane.slack[row],
                "waits for pages but was stopped, or has a step": lane.fetching[row]
                and (not lane.running[row] or lane.in_flight[row]),
                "keeps its slot, with nothing in flight": not lane.running[row]
                and not lane.in_flight[row],
                "has another status in its slot": (lane.running[row], lane.ended[row])
                != (sequence.status == "running", sequence.status == "ended" or sequence.suspect),
            }
            if not lane.ended[row]:
                problems |= {
                    "has another length in its slot": lane.length[row]
                    != len(sequence.tokens) + lane.pending[row],
                    "has another last token in its slot": lane.last_token[row]
                    != sequence.tokens[-1],
                }
            _raise_first(sequence, problems)


def queue_integrity(
    lanes: Items[LaneSlots], waiting: list[Sequence], live: Iterable[Sequence]
) -> Iterator[None]:
    """Raises RuntimeError if a live sequence is in no queue and no slot, or the queue is
    unsorted; yields as `PageAllocator.integrity`."""
    queued, ranks = set(map(id, waiting)), [sequence.rank for sequence in waiting]
    if ranks != sorted(ranks):
        raise RuntimeError("the queue is out of order")
    for sequence in live:
        yield
        home, page_size, cached = sequence.home, lanes[0].page_size, 0
        if home is not None:
            slots = lanes[home.lane]
            cached = int(slots.cached[home.row] + slots.slack[home.row])
        problems: dict[str, object] = {
            "has no slot but runs": sequence.status == "running" and not home,
            "is queued or not, against its status": (sequence.status == "waiting")
            != (id(sequence) in queued),
            "has too few pages": len(sequence.page_ids) < pages_for(cached, page_size),
        }
        _raise_first(sequence, problems)


def _raise_first(sequence: Sequence, problems: dict[str, object]) -> None:
    for problem, found in problems.items():
        if found:
            raise RuntimeError(f"request {sequence.request.request_id!r} {problem}")
