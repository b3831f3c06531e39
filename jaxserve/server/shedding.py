"""Refuses requests whose wait for a first token would be too long, before anything is queued.

`Shedding` stands before the engine of a process with network faces: an engine of its own, or a
router's. Made by `faces.py` and `face_processes.py`. It measures how fast waiting requests are
taken up, and asks the engine how many wait; it knows no slots, pages or workers.
"""

import bisect
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, cast

from jaxserve.engine.request import PATIENCE, SamplingParams, TokenOutput
from jaxserve.errors import OverloadedError
from jaxserve.observe.load import EngineLoad
from jaxserve.text.output import TokenEngine

SAMPLE_SECONDS = 0.05
"""A count of waiting requests is as old at most when a request was taken up."""
LEAST_EVENTS = 4
"""Requests that were taken up while others waited, before which no wait is estimated."""
WINDOW_EVENTS, WINDOW_SECONDS = 64, 20.0
"""The rate is measured over at least as many of them, and as many seconds of waiting."""


def shedding(engine: TokenEngine, seconds: float) -> TokenEngine:
    """The engine, in front of it a `Shedding`; 0 seconds: no request is refused."""
    return cast(TokenEngine, Shedding(engine, seconds)) if seconds else engine


def waiting_in(load: EngineLoad) -> int:
    """Number of requests that wait for a slot, for pages or for a prefill worker."""
    waiting = load.waiting + sum(one.waiting for one in load.workers if one.role == "prefill")
    if load.domains and not any(domain.waiting for domain in load.domains):
        # The engine has not looked at these yet: they wait only where slots are taken.
        waiting = max(0, waiting - max(0, load.slots - load.running))
    return waiting


class Uptake:
    """The rate at which requests are taken up while others wait; under its user's lock."""

    def __init__(self) -> None:
        self._gaps: deque[float] = deque()
        self._total = 0.0
        self._last: float | None = None

    def taken_up(self, now: float, waiting: int) -> None:
        """Notes a request that was taken up, and how many wait now; the first gap begins then."""
        if not waiting:
            self._last = None
            return
        if self._last is not None:
            self._gaps.append(now - self._last)
            self._total += now - self._last
            while len(self._gaps) > WINDOW_EVENTS and self._total - self._gaps[0] > WINDOW_SECONDS:
                self._total -= self._gaps.popleft()
        self._last = now

    def seconds(self, ahead: int, now: float) -> float:
        """How long as many requests take to be taken up; 0 if nothing is known."""
        if len(self._gaps) < LEAST_EVENTS:
            return 0.0
        since = 0.0 if self._last is None else max(0.0, now - self._last)
        return ahead * (self._total + since) / len(self._gaps)


class Shedding:
    """A `TokenEngine` that refuses what would wait too long; otherwise the given one.

    Requests of a class that is served earlier are ahead of fewer others, so they are refused last.

    Args:
      engine: where requests go.
      seconds: the longest estimated wait that is accepted.
      clock: seconds, monotonic.
    """

    def __init__(
        self, engine: TokenEngine, seconds: float, clock: Callable[[], float] = time.monotonic
    ):
        self._engine, self._seconds, self._clock = engine, seconds, clock
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        # Under the lock:
        self._unanswered: list[tuple[float, int]] = []  # ranks, sorted; see `admission.py`
        self._uptake = Uptake()
        self._waiting, self._sampled = 0, -SAMPLE_SECONDS

    def __getattr__(self, name: str) -> Any:
        """Everything else is the engine's."""
        return getattr(self._engine, name)

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        on_output: Callable[[TokenOutput], None],
        *,
        request_id: str | None = None,
        deadline: float | None = None,
        **more: Any,
    ) -> str:
        """See `TokenEngine`; `more` is the engine's own.

        Raises:
          OverloadedError: the estimated wait is too long, with the estimate; or as the engine.
        """
        now = self._clock()
        rank = now + PATIENCE * params.priority, next(self._numbers)
        self._check(rank, now)
        with self._lock:
            bisect.insort(self._unanswered, rank)
        begun = False

        def take(output: TokenOutput) -> None:
            nonlocal begun
            if not begun and (output.token_ids or output.finish_reason is not None):
                begun = True
                self._answered(rank, counts=bool(output.token_ids))
            on_output(output)

        try:
            return self._engine.submit(
                prompt, params, take, request_id=request_id, deadline=deadline, **more
            )
        except BaseException:
            self._answered(rank, counts=False)
            raise

    def _check(self, rank: tuple[float, int], now: float) -> None:
        """Raises OverloadedError where the request would wait too long."""
        with self._lock:
            ahead = bisect.bisect(self._unanswered, rank)
            if self._uptake.seconds(ahead, now) <= self._seconds:
                return
        waiting = waiting_in(self._engine.load())
        with self._lock:
            # The requests that wait are those of the highest ranks.
            behind = len(self._unanswered) - bisect.bisect(self._unanswered, rank)
            ahead = max(0, waiting - behind)
            wait = self._uptake.seconds(ahead, now)
        if wait > self._seconds:
            raise OverloadedError(
                f"the wait for a first token is estimated at {wait:.1f} s, and server.wait_seconds "
                f"= {self._seconds:g}: {ahead} requests are ahead",
                retry_after_s=wait - self._seconds,
            )

    def _answered(self, rank: tuple[float, int], *, counts: bool) -> None:
        """Notes a request's first token, or its end without one."""
        now = self._clock()
        with self._lock:
            stale = now - self._sampled >= SAMPLE_SECONDS
        waiting = waiting_in(self._engine.load()) if counts and stale else None
        with self._lock:
            place = bisect.bisect_left(self._unanswered, rank)
            if self._unanswered[place : place + 1] == [rank]:
                del self._unanswered[place]
            if waiting is not None:
                self._waiting, self._sampled = waiting, now
            if counts:
                self._uptake.taken_up(now, self._waiting)
