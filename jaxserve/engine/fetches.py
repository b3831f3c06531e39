"""Sequences whose first pages a prefill worker holds: what is to be fetched, and what has come.

Called by the scheduler. A sequence with a source is admitted like any other: it gets a slot and
pages. Then it gets no step until the entries that its own prefix cache lacks have been written into
its pages, or will not come. What was written is published to the prefix cache, and the sequence
goes on as if it had been found there; what was not is computed. A sequence that is cancelled or
preempted meanwhile gives its pages back at once: what arrives for it later is written nowhere.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

from jaxserve.engine.dp_group import DPGroup
from jaxserve.engine.lane_slots import LaneSlots
from jaxserve.engine.pages import pages_for
from jaxserve.engine.sequence import Sequence
from jaxserve.link.pages.source import PagesSource
from jaxserve.roles.layout import PageRun


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

    def __len__(self) -> int:
        return len(self._fetches)

    def begin(self, sequence: Sequence) -> None:
        """Lets an admitted sequence wait, if its source has entries that its cache lacks."""
        source = sequence.source
        if source is None or sequence.home is None:
            return
        slots, row = self._row(sequence)
        start, size = int(slots.cached[row]), slots.page_size
        stop = min(source.tokens, sequence.reusable) // size * size
        if stop <= start:
            return
        ticket, self._count = self._count, self._count + 1
        order = FetchOrder(
            ticket,
            sequence.request.request_id,
            source,
            start,
            stop,
            sequence.home.group,
            sequence.tokens[: source.tokens].tolist(),
        )
        self._fetches[ticket] = _Fetch(order, sequence, start, start)
        self._new.append(order)
        sequence.ticket = ticket
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
            self._dropped.append(sequence.ticket)
            self._end(sequence.ticket)

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
        return PageRun(fetch.order.group, page_ids)

    def written(self, ticket: int, tokens: int) -> None:
        """Counts tokens whose entries are written. After the last one the sequence goes on."""
        fetch = self._fetches[ticket]
        fetch.written += tokens
        if fetch.written == fetch.order.stop:
            self._finish(ticket)

    def failed(self, ticket: int) -> tuple[Sequence, int] | None:
        """Ends a fetch early: the sequence goes on with the entries that have come.

        Returns:
          the sequence and the number of tokens that it lacks; None if the fetch was dropped.
        """
        fetch = self._fetches.get(ticket)
        if fetch is None:
            return None
        self._finish(ticket)
        return fetch.sequence, fetch.order.stop - fetch.written

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

    def _finish(self, ticket: int) -> None:
        fetch = self._end(ticket)
        sequence, done = fetch.sequence, fetch.written
        sequence.source = None
        slots, row = self._row(sequence)
        slots.cached[row] = slots.found[row] = done
        assert sequence.home is not None
        self._groups[sequence.home.group].publish(sequence, done)
        slots.published[row] = len(sequence.prefix)

    def _end(self, ticket: int) -> _Fetch:
        fetch = self._fetches.pop(ticket)
        fetch.sequence.ticket = None
        slots, row = self._row(fetch.sequence)
        slots.fetching[row] = False
        return fetch

    def _row(self, sequence: Sequence) -> tuple[LaneSlots, int]:
        assert sequence.home is not None
        slots = self._lanes[sequence.home.lane]
        return slots, slots.row(sequence)
