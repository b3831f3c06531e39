"""Sequences whose first pages a prefill worker holds: what is to be fetched, and what has come.

Called by the scheduler. A sequence with a source is admitted like any other: it gets a slot and
pages. Then it gets no step until the entries that its own prefix cache lacks have been written into
its pages, or will not come. What was written is published to the prefix cache, and the sequence
goes on as if it had been found there; what was not is computed. A sequence that is cancelled or
preempted meanwhile gives its pages back at once: what arrives for it later is written nowhere.
"""

from collections.abc import Sequence as Items
from typing import NamedTuple

from jaxserve.engine.dp_group import DPGroup
from jaxserve.engine.lane_slots import LaneSlots
from jaxserve.engine.pages import pages_for
from jaxserve.engine.sequence import Sequence
from jaxserve.link.pages import PagesSource
from jaxserve.roles.layout import PageRun


class FetchOrder(NamedTuple):
    """Fetch these tokens' KV entries for a sequence that has its pages."""

    ticket: int
    """Names the fetch in its scheduler; never used again."""
    request_id: str
    source: PagesSource
    start: int
    """The first token to fetch."""
    stop: int
    """The token after the last."""
    group: int
    token_ids: list[int]
    """All tokens whose entries the source holds."""


class Fetches:
    """All fetches of one scheduler.

    Args:
      groups, lanes: the scheduler's.
    """

    def __init__(self, groups: Items[DPGroup], lanes: Items[LaneSlots]):
        self._groups, self._lanes = groups, lanes
        self._orders: dict[int, FetchOrder] = {}
        self._sequences: dict[int, Sequence] = {}
        self._arrived: dict[int, int] = {}  # tokens up to which entries have arrived
        self._done: dict[int, int] = {}  # and up to which they are written
        self._new: list[FetchOrder] = []
        self._dropped: list[int] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._orders)

    def begin(self, sequence: Sequence) -> None:
        """The sequence was admitted: it waits from now on if its source has what it lacks."""
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
        self._orders[ticket], self._sequences[ticket] = order, sequence
        self._done[ticket] = self._arrived[ticket] = start
        self._new.append(order)
        sequence.ticket = ticket
        slots.fetching[row] = True

    def take_new(self) -> list[FetchOrder]:
        """Fetches that were begun since this was called last, and are still wanted."""
        new, self._new = self._new, []
        return [order for order in new if order.ticket in self._orders]

    def take_dropped(self) -> list[int]:
        """Tickets of the fetches that were dropped since this was called last."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def wanted(self, ticket: int) -> bool:
        """Whether somebody waits for the fetch."""
        return ticket in self._orders

    def drop(self, sequence: Sequence) -> None:
        """The sequence leaves its slot: nothing is to be written for it."""
        if sequence.ticket is not None:
            self._dropped.append(sequence.ticket)
            self._end(sequence.ticket)

    def run(self, ticket: int, first: int, tokens: int) -> PageRun | None:
        """So many tokens from `first` on have arrived: the pages into which they are to be written,
        or None if the fetch is not wanted any more.

        Raises:
          ValueError: they do not follow what arrived last, or reach beyond the end.
        """
        order = self._orders.get(ticket)
        if order is None:
            return None
        arrived = self._arrived[ticket]
        if first != arrived or not 0 < tokens <= order.stop - first:
            raise ValueError(
                f"tokens {first} to {first + tokens} arrived, expected {arrived} to {order.stop}"
            )
        size = self._lanes[0].page_size
        begin, end = first // size, pages_for(first + tokens, size)
        page_ids = self._sequences[ticket].page_ids[begin:end]
        if len(page_ids) < end - begin:
            raise ValueError(f"{len(page_ids)} pages for tokens {first} to {first + tokens}")
        self._arrived[ticket] += tokens
        return PageRun(order.group, page_ids)

    def written(self, ticket: int, tokens: int) -> None:
        """So many more tokens' entries are written; with the last ones the sequence goes on."""
        self._done[ticket] += tokens
        if self._done[ticket] == self._orders[ticket].stop:
            self._finish(ticket)

    def failed(self, ticket: int) -> tuple[Sequence, int] | None:
        """The rest does not come: the sequence goes on with what it has.

        Returns the sequence and how many tokens it lacks of what it wanted, or None if the fetch
        was not wanted any more.
        """
        order = self._orders.get(ticket)
        if order is None:
            return None
        sequence, missing = self._sequences[ticket], order.stop - self._done[ticket]
        self._finish(ticket)
        return sequence, missing

    def check_integrity(self) -> None:
        """Raises RuntimeError unless exactly the rows that wait have a fetch."""
        waiting = {
            sequence.request.request_id
            for lane in self._lanes
            for sequence in lane.sequences[lane.fetching]
        }
        ordered = {order.request_id for order in self._orders.values()}
        if waiting != ordered:
            raise RuntimeError(f"{sorted(waiting)} wait for pages, {sorted(ordered)} are fetched")
        for ticket, sequence in self._sequences.items():
            order, done, arrived = self._orders[ticket], self._done[ticket], self._arrived[ticket]
            ascending = order.start <= done < order.stop and done <= arrived <= order.stop
            if sequence.ticket != ticket or not ascending:
                raise RuntimeError(f"fetch {ticket} of {order.request_id!r} does not add up")

    def _finish(self, ticket: int) -> None:
        sequence, done = self._sequences[ticket], self._done[ticket]
        sequence.source = None
        self._end(ticket)
        slots, row = self._row(sequence)
        slots.cached[row] = slots.found[row] = done
        assert sequence.home is not None
        self._groups[sequence.home.group].publish(sequence, done)
        slots.published[row] = len(sequence.prefix)

    def _end(self, ticket: int) -> None:
        sequence = self._sequences.pop(ticket)
        del self._orders[ticket], self._arrived[ticket], self._done[ticket]
        sequence.ticket = None
        slots, row = self._row(sequence)
        slots.fetching[row] = False

    def _row(self, sequence: Sequence) -> tuple[LaneSlots, int]:
        assert sequence.home is not None
        slots = self._lanes[sequence.home.lane]
        return slots, slots.row(sequence)
