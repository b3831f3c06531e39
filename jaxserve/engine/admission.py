"""Admission: the next request, its DP group, and the pages that are fetched for it.

Called by `scheduler.py`, whose docstring has the policy. Plain arithmetic over requests and pages.

A sequence whose first pages a prefill worker holds is admitted like any other: it gets a slot and
pages. It gets no step until the entries that its own prefix cache lacks have been written into its
pages, or will not come (`Fetches`). Written entries are published to the prefix cache, and the
sequence goes on as if they had been found there; missing entries are computed. A sequence that is
cancelled or preempted meanwhile gives its pages back at once: entries that arrive later are
written nowhere.
"""

import bisect
import itertools
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from jaxserve.engine.dp_group import DPGroup
from jaxserve.engine.lane_slots import LaneSlots
from jaxserve.engine.pages import PageNode
from jaxserve.engine.request import Request
from jaxserve.engine.sequence import Sequence
from jaxserve.link.pages.source import PagesSource
from jaxserve.roles.layout import PageRun, pages_for

if TYPE_CHECKING:
    from jaxserve.engine.scheduler import Scheduler


class FetchOrder(NamedTuple):
    """Fetch these tokens' KV entries for a sequence that has its pages.

    Attributes:
      ticket: Number of the fetch in its scheduler; never used again.
      request_id: Request that waits for the pages.
      source: Where a prefill worker holds them.
      start: First token to fetch.
      stop: Token after the last.
      group: DP group of the sequence.
      token_ids: All tokens whose entries the source holds.
    """

    ticket: int
    request_id: str
    source: PagesSource
    start: int
    stop: int
    group: int
    token_ids: list[int]


@dataclass(eq=False)
class _Fetch:
    """A fetch under way."""

    order: FetchOrder
    sequence: Sequence
    arrived: int
    """Tokens up to which entries have arrived."""
    written: int
    """Tokens up to which entries are written."""


class Fetches:
    """All fetches of one scheduler.

    Args:
      groups: The scheduler's DP groups.
      lanes: The scheduler's lanes.
    """

    def __init__(self, groups: Items[DPGroup], lanes: Items[LaneSlots]):
        self._groups, self._lanes = groups, lanes
        self._fetches: dict[int, _Fetch] = {}  # by ticket
        self._new: list[FetchOrder] = []
        self._dropped: list[int] = []
        self._count = 0

    def prepare(self, sequence: Sequence) -> None:
        """Called at every plan while a sequence is the first that waits for a slot or for pages."""

    def begin(self, sequence: Sequence) -> None:
        """Lets an admitted sequence wait, if its source has entries that its cache lacks."""
        source = sequence.source
        if source is None or sequence.home is None:
            return
        slots, row = self._row(sequence)
        start, size = int(slots.cached[row]), slots.page_size
        stop = min(source.tokens, sequence.reusable) // size * size
        group = self._groups[sequence.home.group]
        # A ring is held for the end of the source alone.
        if stop <= start or (group.rings is not None and stop < source.tokens):
            return
        if group.rings is not None:
            group.open_ring(sequence, stop // size, group.rings.first_read(stop))
        ticket, self._count = self._count, self._count + 1
        request_id, tokens = sequence.request.request_id, sequence.tokens[: source.tokens]
        held = tokens.tolist()
        order = FetchOrder(ticket, request_id, source, start, stop, group.index, held)
        self._fetches[ticket] = _Fetch(order, sequence, start, start)
        self._new.append(order)
        sequence.ticket = ticket
        # A row gets no step until this is cleared: it would read entries that are yet to come.
        slots.fetching[row] = True

    def take_new(self) -> list[FetchOrder]:
        """Returns the fetches that began since the last call and are still wanted."""
        new, self._new = self._new, []
        return [order for order in new if order.ticket in self._fetches]

    def take_dropped(self) -> list[int]:
        """Returns the tickets of the fetches that were dropped since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def wanted(self, ticket: int) -> bool:
        """True if a sequence waits for the fetch."""
        return ticket in self._fetches

    def drop(self, sequence: Sequence) -> None:
        """Ends the fetch of a sequence that leaves its slot: nothing more is written for it."""
        if sequence.ticket is not None:
            order = self._end(sequence.ticket).order
            if order.source.address:  # without one they come from this worker's own host
                self._dropped.append(order.ticket)

    def run(self, ticket: int, first: int, tokens: int) -> PageRun | None:
        """Returns the pages for tokens that have arrived; None if the fetch was dropped.

        Args:
          ticket: The fetch.
          first: The first token that arrived.
          tokens: Number of tokens that arrived.

        Raises:
          ValueError: The tokens do not follow the last ones, or reach beyond the end of the fetch
            or of the sequence's pages.
        """
        fetch = self._fetches.get(ticket)
        if fetch is None:
            return None
        arrived, stop = fetch.arrived, fetch.order.stop
        if first != arrived or not 0 < tokens <= stop - first:
            raise ValueError(
                f"tokens {first} to {first + tokens} arrived, expected {arrived} to {stop}"
            )
        size = self._lanes[0].page_size
        begin, end = first // size, pages_for(first + tokens, size)
        page_ids = fetch.sequence.page_ids[begin:end]
        if len(page_ids) < end - begin:
            raise ValueError(f"{len(page_ids)} pages for tokens {first} to {first + tokens}")
        fetch.arrived += tokens
        group = self._groups[fetch.order.group]
        return PageRun(group.index, group.with_rings(page_ids, fetch.sequence.ring, begin))

    def written(self, ticket: int, tokens: int) -> Sequence | None:
        """Counts written tokens; returns the sequence after the last one, to go on."""
        fetch = self._fetches[ticket]
        fetch.written += tokens
        if fetch.written < fetch.order.stop:
            return None
        self._finish(ticket)
        return fetch.sequence

    def failed(self, ticket: int) -> tuple[Sequence, int] | None:
        """Ends a fetch early: the sequence goes on with the entries that have come.

        Returns:
          the sequence and the number of tokens that it lacks; None if the fetch was dropped.
        """
        fetch = self._fetches.get(ticket)
        if fetch is None:
            return None
        return fetch.sequence, fetch.order.stop - self._finish(ticket)

    def check_integrity(self) -> None:
        """Raises RuntimeError unless exactly the rows that wait have a fetch."""
        waiting = {
            sequence.request.request_id
            for lane in self._lanes
            for sequence in lane.sequences[lane.fetching]
        }
        ordered = {fetch.order.request_id for fetch in self._fetches.values()}
        if waiting != ordered:
            raise RuntimeError(f"{sorted(waiting)} wait for pages, {sorted(ordered)} are fetched")
        for ticket, fetch in self._fetches.items():
            order, done, arrived = fetch.order, fetch.written, fetch.arrived
            ascending = order.start <= done < order.stop and done <= arrived <= order.stop
            if fetch.sequence.ticket != ticket or not ascending:
                raise RuntimeError(f"fetch {ticket} of {order.request_id!r} does not add up")

    def _finish(self, ticket: int) -> int:
        """Lets the sequence go on; returns the tokens whose entries it can use."""
        fetch = self._end(ticket)
        sequence, done = fetch.sequence, fetch.written
        group = self._groups[fetch.order.group]
        if group.rings is not None and done < fetch.order.stop:  # which lacks the ring's pages
            done = fetch.order.start
            group.cut_ring(sequence, len(sequence.prefix))
        sequence.source = None
        slots, row = self._row(sequence)
        slots.cached[row] = slots.found[row] = done
        group.publish(sequence, done)
        return done

    def _end(self, ticket: int) -> _Fetch:
        fetch = self._fetches.pop(ticket)
        fetch.sequence.ticket = None
        slots, row = self._row(fetch.sequence)
        slots.fetching[row] = False
        return fetch

    def _row(self, sequence: Sequence) -> tuple[LaneSlots, int]:
        return self._lanes[sequence.place.lane], sequence.place.row


class GroupLoad:
    """The load of a DP group with a free slot, computed once for all waiting requests."""

    def __init__(self, group: DPGroup):
        self.group = group
        self.refresh()

    def refresh(self) -> None:
        """Updates the load after an admission."""
        free = self.group.free_pages
        self._used = self.group.pool.pages - free + self.group.promised
        self._available = free - self.group.residents_count  # a spare page for each

    def cost(self, pages: int, prefix: list[PageNode]) -> int | None:
        """Returns the cost of admitting a sequence, in pages; None if the group has too few
        (xDeepServe §4.3).

        The cost is the size of the group's KV cache afterwards, including the pages that its
        sequences need to reach full length, plus once more the pages that have to be computed.

        Args:
          pages: pages that the sequence needs at once.
          prefix: pages of the sequence in the group's prefix cache.
        """
        computed = pages - len(prefix)
        # Pages without users count as free until now; they are the last ones of a path.
        unused = sum(1 for _ in itertools.takewhile(lambda node: not node.users, reversed(prefix)))
        if computed > self._available - unused:
            return None
        return self._used + unused + 2 * computed


class AdmissionQueue:
    """Sequences that wait for pages and a slot, in order of deadline.

    Args:
      groups: DP groups that sequences are admitted to.
      page_size: tokens a page.
      fetches: begun for sequences whose first pages are elsewhere.
    """

    def __init__(self, groups: Items[DPGroup], page_size: int, fetches: Fetches):
        self._groups, self._page_size, self.fetches = groups, page_size, fetches
        self.waiting: list[Sequence] = []
        self.prompt_tokens = 0
        """Prompt tokens that were looked up in the prefix cache, since the start."""
        self.prompt_tokens_found = 0
        """Part of `prompt_tokens` that was found there."""
        self.takes_options: Callable[[], bool] = lambda: True
        """Tells whether requests with options are admitted; until then others overtake them."""
        self._admitted: list[Sequence] = []

    def push(self, sequence: Sequence) -> None:
        """Queues a sequence in the order of ranks."""
        bisect.insort(self.waiting, sequence, key=rank)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence that will not be admitted."""
        del self.waiting[bisect.bisect_left(self.waiting, sequence.rank, key=rank)]

    def take_admitted(self) -> list[Sequence]:
        """Returns the sequences admitted for the first time since the last call."""
        admitted, self._admitted = self._admitted, []
        return admitted

    def cost(self, sequence: Sequence) -> int | None:
        """Cost of admitting a sequence now, in pages; None: it would have to wait."""
        if self.waiting:
            return None
        loads = [GroupLoad(group) for group in self._groups if not group.full]
        best = _cheapest(loads, sequence, self._pages(sequence))
        return None if best is None else best[0]

    def admit(self) -> None:
        """Admits from the head of the queue, as long as the first one fits a group."""
        if not self.waiting:
            return
        loads = [GroupLoad(group) for group in self._groups if not group.full]
        while (sequence := self._first()) and not sequence.home:  # else it has a step in flight
            pages = self._pages(sequence)
            best = _cheapest(loads, sequence, pages)
            # Nothing behind the first is admitted in its place: a stream of small requests would
            # take each page that comes free, and a large one would wait for ever.
            if best is None:
                self.fetches.prepare(sequence)
                return
            _, load, prefix = best
            self.remove(sequence)
            if sequence.found is None:
                self._admitted.append(sequence)
                self.prompt_tokens += len(sequence.tokens)
                self.prompt_tokens_found += len(prefix) * self._page_size
            group = load.group
            group.admit(sequence, group.lane_for(sequence), pages, prefix)
            self.fetches.begin(sequence)
            load.refresh()
            if group.full:
                loads.remove(load)

    def _first(self) -> Sequence | None:
        """Returns the first sequence in the queue that may be admitted."""
        all_may = self.takes_options()
        return next((one for one in self.waiting if all_may or not one.has_options), None)

    def _pages(self, sequence: Sequence) -> int:
        """Returns the number of pages that the sequence needs at admission."""
        tokens = min(len(sequence.tokens) + 1, sequence.longest_cache)
        return pages_for(tokens, self._page_size)


def rank(sequence: Sequence) -> tuple[float, int]:
    """Sort key of waiting and resident sequences."""
    return sequence.rank


def _cheapest(
    loads: Items[GroupLoad], sequence: Sequence, pages: int
) -> tuple[int, GroupLoad, list[PageNode]] | None:
    """Returns the least cost of admitting the sequence, the group that offers it, and the
    sequence's pages in that group's prefix cache."""
    best: tuple[int, GroupLoad, list[PageNode]] | None = None
    for load in loads:
        prefix = load.group.match(sequence)
        cost = load.cost(pages, prefix)
        if cost is not None and (best is None or cost < best[0]):
            best = cost, load, prefix
    return best


def choose_domain(schedulers: "Items[Scheduler]", request: Request) -> int:
    """Returns the domain with the most room.

    Prefers domains that have a slot and pages now, and of these the cheapest: the cost is the pages
    in use and those to be computed, so a prefix in the cache makes a domain cheap. If the request
    would wait everywhere, takes the domain with the fewest waiting, then the fewest running ones.
    """
    if len(schedulers) == 1:
        return 0

    def room(domain: int) -> tuple[bool, int, int, int]:
        scheduler = schedulers[domain]
        cost = scheduler.cost(request)
        return cost is None, scheduler.num_waiting, cost or 0, scheduler.num_running

    return min(range(len(schedulers)), key=room)
