"""Prompts that a prefill worker runs and holds: which may run, what is held, and until when.

Used by the loop (`loop.py`), on the engine's thread; plain Python with an injected clock. A prompt
runs as an ordinary request for one token, which nobody reads. When it ends, its pages stay in the
prefix cache, in use, under a lease. They are let go when the lease is released or runs out. What is
held is bounded, in requests and in pages; a prompt that would go beyond waits here.
"""

import bisect
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from jaxserve.engine.pages import pages_for
from jaxserve.engine.request import Request
from jaxserve.engine.request_checks import due
from jaxserve.engine.scheduler import Scheduler
from jaxserve.errors import InvalidRequestError, OverloadedError
from jaxserve.roles.layout import PageRun


class HoldLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How much is held, and for how long.

    Attributes:
      requests: whose prompts run or are held at a time.
      pages: that those may take together; one prompt always may.
      lease_seconds: after which pages that nobody asks about are let go.
      quadratic_tokens: length at which attention takes as long as the linear maps do.
      tokens_per_second: what a worker prefills, roughly: it turns tokens into the seconds by which
        a longer prompt is due later than a shorter one.
    """

    requests: int
    pages: int
    lease_seconds: float = 30.0
    quadratic_tokens: int = 32768
    tokens_per_second: float = 4096.0


@dataclass(eq=False)
class Hold:
    """Pages that are held."""

    request: Request
    hand_off: str
    tokens: int
    group: int
    page_ids: list[int]
    until: float
    """Seconds of the clock at which the lease ends."""
    digest: str = ""
    """The digest that fetches must quote, see `pages_digest`."""


class Holds:
    """All prompts of one scheduler.

    Args:
      scheduler: runs them; with a prefix cache.
      limits: of what is held.
      clock: seconds.
      new_id: draws the names of leases, which nobody may guess.
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
        self._running: dict[str, Request] = {}
        self._held: dict[str, Hold] = {}  # by request
        self._by_hand_off: dict[str, Hold] = {}
        self._seen = 0

    @property
    def waiting(self) -> int:
        """How many prompts wait for room."""
        return len(self._waiting)

    @property
    def held(self) -> int:
        """Prompts whose pages are held."""
        return len(self._held)

    def of_request(self, request_id: str) -> Hold | None:
        """The hold of a request, by its id."""
        return self._held.get(request_id)

    def of_hand_off(self, hand_off: str) -> Hold | None:
        """The hold of a lease, by the lease's name."""
        return self._by_hand_off.get(hand_off)

    def add(self, request: Request) -> None:
        """Takes a prompt of whole pages in; it runs when there is room.

        Raises:
          InvalidRequestError: it could never run.
          OverloadedError: too many wait.
        """
        self._scheduler.check(request)
        known = request.request_id in self._running or request.request_id in self._held
        if known or any(request.request_id == other.request_id for *_, other in self._waiting):
            raise InvalidRequestError("request_id", f"{request.request_id!r} is already running")
        waiting = self.waiting + self._scheduler.num_waiting
        if waiting >= self._scheduler.max_waiting:
            raise OverloadedError(f"{waiting} prompts wait already")
        self._seen += 1
        bisect.insort(self._waiting, (self._due(request), self._seen, request), key=_rank)
        self.admit()

    def admit(self) -> None:
        """Lets prompts run that wait, as long as there is room for the pages of the first."""
        while self._waiting and self._room(self._waiting[0][-1]):
            when, _, request = self._waiting.pop(0)
            self._running[request.request_id] = request
            self._scheduler.add(request, due_at=when)

    def ended(self, request_id: str) -> None:
        """The scheduler has ended a prompt, and holds its pages if it was computed."""
        request = self._running.pop(request_id, None)
        if request is None:
            return
        held = self._scheduler.held(request_id)
        if held is not None:
            group, page_ids = held
            until = self._clock() + self.limits.lease_seconds
            hold = Hold(request, self._new_id(), len(request.prompt), group, page_ids, until)
            self._held[request_id] = self._by_hand_off[hold.hand_off] = hold
        self.admit()

    def cancel(self, request_id: str) -> bool:
        """Forgets a prompt that waits, or lets its pages go; whether it waited. The scheduler is
        told of one that runs by others."""
        if request_id in self._held:
            self._let_go(self._held[request_id])
            return False
        before = len(self._waiting)
        self._waiting = [entry for entry in self._waiting if entry[-1].request_id != request_id]
        return len(self._waiting) < before

    def renew(self, hand_off: str) -> bool:
        """Renews a lease; False if it is unknown."""
        hold = self._by_hand_off.get(hand_off)
        if hold is None:
            return False
        hold.until = self._clock() + self.limits.lease_seconds
        return True

    def release(self, hand_off: str) -> None:
        """Lets the pages of a lease go; unknown ones are fine."""
        if hold := self._by_hand_off.get(hand_off):
            self._let_go(hold)

    def run(self, hand_off: str, start: int, stop: int) -> PageRun:
        """Where the entries of some held tokens are.

        Raises:
          KeyError: the lease is unknown, or is over.
          ValueError: it has no such tokens.
        """
        hold = self._by_hand_off[hand_off]
        if not 0 <= start < stop <= hold.tokens:
            raise ValueError(f"tokens {start} to {stop} wanted, {hold.tokens} are held")
        size = self._scheduler.page_size
        pages = hold.page_ids[start // size : pages_for(stop, size)]
        return PageRun(hold.group, pages, start % size)

    def tick(self) -> None:
        """Releases the holds whose lease has expired."""
        now = self._clock()
        for hold in [hold for hold in self._held.values() if hold.until <= now]:
            self.expired += 1
            self._let_go(hold)

    @property
    def next_deadline(self) -> float | None:
        """When the next lease ends, if there is one."""
        return min((hold.until for hold in self._held.values()), default=None)

    def _let_go(self, hold: Hold) -> None:
        del self._held[hold.request.request_id], self._by_hand_off[hold.hand_off]
        self._scheduler.let_go(hold.request.request_id)
        self.admit()

    def _room(self, request: Request) -> bool:
        if len(self._running) + len(self._held) >= self.limits.requests:
            return False
        size = self._scheduler.page_size
        running = sum(pages_for(len(other.prompt), size) for other in self._running.values())
        taken = running + sum(len(hold.page_ids) for hold in self._held.values())
        return not taken or taken + pages_for(len(request.prompt), size) <= self.limits.pages

    def _due(self, request: Request) -> float:
        """When a prompt should be done: shorter ones sooner, so that they need not wait behind a
        long one, and no prompt is overtaken by more than what arrives in the time that it takes."""
        tokens = len(request.prompt) - self._scheduler.cached_tokens(request)
        length = len(request.prompt)
        before = length - tokens
        quadratic = (length * length - before * before) / self.limits.quadratic_tokens
        return due(request) + (tokens + quadratic) / self.limits.tokens_per_second


def _rank(entry: tuple[float, int, Request]) -> tuple[float, int]:
    return entry[:2]
