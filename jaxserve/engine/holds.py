"""Prompts whose KV pages a prefill worker holds for decode workers, each under a lease.

A prefill worker runs a prompt as an ordinary request for one token, which is discarded. When it
ends, `Holds` keeps its pages until the lease is released or runs out. The number of held requests
and pages is bounded; a prompt beyond the bounds waits here. Called by the loop and by
`hand_off.py`. Plain Python over requests and pages; knows no network.
"""

import bisect
import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from jaxserve.engine.request import Request, due
from jaxserve.engine.scheduler import Scheduler
from jaxserve.errors import InvalidRequestError, OverloadedError
from jaxserve.roles.layout import PageRun, pages_for

logger = logging.getLogger(__name__)


class HoldLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of what a prefill worker holds.

    Attributes:
      requests: Most prompts that run or are held at a time.
      pages: Most pages that those take together. A single prompt may take more.
      lease_seconds: Time after which pages are given back if no worker renews their lease.
      tokens_per_second: Rough speed of prefill. It turns tokens into the seconds by which a longer
        prompt is due later than a shorter one.
    """

    requests: int
    pages: int
    lease_seconds: float = 30.0
    tokens_per_second: float = 4096.0


@dataclass(eq=False)
class Hold:
    """One prompt whose pages are held.

    Attributes:
      request: The prompt.
      hand_off: Name of the lease.
      tokens: Tokens of the prompt, whose entries fill the pages.
      group: DP group of the pages.
      page_ids: Pages in the order of the tokens.
      until: Seconds of the clock at which the lease ends.
      digest: Digest that fetches must quote, see `pages_digest`.
    """

    request: Request
    hand_off: str
    tokens: int
    group: int
    page_ids: list[int]
    until: float
    digest: str = ""


class Holds:
    """All prompts that one scheduler runs and holds.

    Args:
      scheduler: Runs the prompts; it has a prefix cache.
      limits: Bounds of the held prompts and their pages.
      clock: Returns seconds.
      new_id: Draws the name of a lease, which must be hard to guess.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        limits: HoldLimits,
        clock: Callable[[], float],
        new_id: Callable[[], str],
    ):
        self.limits = limits
        self.expired = 0
        """Leases that ran out, since the start."""
        self._scheduler, self._clock, self._new_id = scheduler, clock, new_id
        self._waiting: list[tuple[float, int, Request]] = []  # by when they are due
        self._waiting_by_id: dict[str, tuple[float, int, Request]] = {}
        self._running: dict[str, Request] = {}
        self._held: dict[str, Hold] = {}  # by request
        self._by_hand_off: dict[str, Hold] = {}
        self._seen = 0

    @property
    def waiting(self) -> int:
        """Number of prompts that wait for room."""
        return len(self._waiting)

    @property
    def held(self) -> int:
        """Number of prompts whose pages are held."""
        return len(self._held)

    def of_request(self, request_id: str) -> Hold | None:
        """Returns the hold of a request."""
        return self._held.get(request_id)

    def of_hand_off(self, hand_off: str) -> Hold | None:
        """Returns the hold of a lease."""
        return self._by_hand_off.get(hand_off)

    def add(self, request: Request) -> None:
        """Takes in a prompt of whole pages, which runs when room is left for it.

        Raises:
          InvalidRequestError: The prompt could never run, or its id is in use.
          OverloadedError: Too many prompts wait.
        """
        self._scheduler.limits.check(request)
        known = self._running, self._held, self._waiting_by_id
        if any(request.request_id in some for some in known):
            raise InvalidRequestError("request_id", f"{request.request_id!r} is already running")
        waiting = self.waiting + self._scheduler.num_waiting
        if waiting >= self._scheduler.max_waiting:
            raise OverloadedError(f"{waiting} prompts wait already")
        self._queue(self._due(request), request)
        self.admit()

    def admit(self) -> None:
        """Starts waiting prompts, in order, while the pages of the first one find room.

        A prompt that the scheduler refuses, because its queue is full, stays first in line.
        """
        while self._waiting and self._room(self._waiting[0][-1]):
            when, _, request = self._waiting[0]
            try:
                self._scheduler.add(request, due_at=when)
            except OverloadedError:
                return
            self._running[request.request_id] = request
            del self._waiting[0], self._waiting_by_id[request.request_id]

    def ended(self, request_id: str) -> None:
        """Begins the lease of a prompt that has ended, if the scheduler holds its pages.

        Pages that do not cover the prompt are given back: a fetch of the rest would read pages of
        other requests.
        """
        request = self._running.pop(request_id, None)
        held = self._scheduler.held(request_id)
        if request is not None and held is not None:
            group, page_ids = held
            tokens, until = len(request.prompt), self._clock() + self.limits.lease_seconds
            covered = pages_for(tokens, self._scheduler.page_size) * self._scheduler.tables
            if len(page_ids) == covered:
                hold = Hold(request, self._new_id(), tokens, group, page_ids, until)
                self._held[request_id] = self._by_hand_off[hold.hand_off] = hold
            else:
                logger.error(
                    "request %r: %d pages for %d tokens are not held",
                    *(request_id, len(page_ids), tokens),
                )
                self._scheduler.let_go(request_id)
        self.admit()

    def cancel(self, request_id: str) -> bool:
        """Forgets a waiting prompt, or gives the pages of a held one back. The caller cancels a
        running one with the scheduler. Returns whether the prompt waited."""
        if request_id in self._held:
            self._let_go(self._held[request_id])
            return False
        entry = self._waiting_by_id.pop(request_id, None)
        if entry is not None:
            del self._waiting[bisect.bisect_left(self._waiting, _rank(entry), key=_rank)]
        return entry is not None

    def renew(self, hand_off: str) -> bool:
        """Begins a lease anew; returns False if it is unknown."""
        if hold := self._by_hand_off.get(hand_off):
            hold.until = self._clock() + self.limits.lease_seconds
        return hold is not None

    def release(self, hand_off: str) -> None:
        """Gives the pages of a lease back. An unknown lease is ignored."""
        if hold := self._by_hand_off.get(hand_off):
            self._let_go(hold)

    def run(self, hand_off: str, start: int, stop: int) -> PageRun:
        """Returns the pages with the entries of tokens `start` to `stop` of a lease.

        Raises:
          KeyError: The lease is unknown, or is over.
          ValueError: The lease does not hold these tokens.
        """
        hold = self._by_hand_off[hand_off]
        if not 0 <= start < stop <= hold.tokens:
            raise ValueError(f"tokens {start} to {stop} wanted, {hold.tokens} are held")
        size, tables = self._scheduler.page_size, self._scheduler.tables
        pages = hold.page_ids[start // size * tables : pages_for(stop, size) * tables]
        return PageRun(hold.group, pages, start % size)

    def tick(self) -> None:
        """Releases the holds whose lease has expired."""
        now = self._clock()
        for hold in [hold for hold in self._held.values() if hold.until <= now]:
            self.expired += 1
            self._let_go(hold)

    @property
    def next_deadline(self) -> float | None:
        """Seconds of the clock at which the next lease ends; None without leases."""
        return min((hold.until for hold in self._held.values()), default=None)

    def _let_go(self, hold: Hold) -> None:
        del self._held[hold.request.request_id], self._by_hand_off[hold.hand_off]
        self._scheduler.let_go(hold.request.request_id)
        self.admit()

    def _queue(self, due: float, request: Request) -> None:
        self._seen += 1
        entry = due, self._seen, request
        bisect.insort(self._waiting, entry, key=_rank)
        self._waiting_by_id[request.request_id] = entry

    def _room(self, request: Request) -> bool:
        if len(self._running) + len(self._held) >= self.limits.requests:
            return False
        size = self._scheduler.page_size
        running = sum(pages_for(len(other.prompt), size) for other in self._running.values())
        taken = running + sum(pages_for(hold.tokens, size) for hold in self._held.values())
        return not taken or taken + pages_for(len(request.prompt), size) <= self.limits.pages

    def _due(self, request: Request) -> float:
        """Returns when a prompt should be done. A shorter one is due sooner, and need not wait
        behind a long one. Only what arrives while a prompt would run can overtake it."""
        tokens = len(request.prompt) - self._scheduler.cached_tokens(request)
        return due(request) + tokens / self.limits.tokens_per_second


def _rank(entry: tuple[float, int, Request]) -> tuple[float, int]:
    return entry[:2]
