"""Whose message runs next on an ffn worker that several domains share (xDeepServe §5.2).

Every domain has a thread that waits for its messages (`server.py`) and takes a turn for each.
Where several wait, the one that had its last turn longest ago is next, so a domain of many lanes
does not keep another waiting for more than one of its messages. That holds only while the devices'
queues are short, for they are in order: with several domains, no more than `AHEAD` messages wait
behind the one that runs.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Protocol

AHEAD = 1
"""Messages in the devices' queues beside the one that runs: enough to keep them busy."""


class Result(Protocol):
    """An array that is being computed."""

    def block_until_ready(self) -> Any: ...


class Turns:
    """Rotation among whoever waits; called from any thread.

    Args:
      shared: whether several domains are there.
    """

    def __init__(self, shared: Callable[[], bool]):
        self._shared = shared
        self._changed = threading.Condition()
        self._waiting: list[Hashable] = []
        self._served: dict[Hashable, int] = {}
        self._count = 0
        self._taken = False
        self._running: deque[Result] = deque()

    @property
    def waiting(self) -> int:
        """How many domains wait for their turn."""
        return len(self._waiting)

    @contextlib.contextmanager
    def take(self, who: Hashable) -> Iterator[None]:
        """Waits for the turn of `who`, who has it in the body. Whoever never had one is next."""
        with self._changed:
            self._waiting.append(who)
            self._changed.wait_for(lambda: not self._taken and self._next() == who)
            self._waiting.remove(who)
            self._count += 1
            self._served[who] = self._count
            self._taken = True
        try:
            yield
        finally:
            with self._changed:
                self._taken = False
                self._changed.notify_all()

    def enqueued(self, result: Result) -> None:
        """What the body has enqueued; waits, where domains share, until the queue is short."""
        self._running.append(result)
        while len(self._running) > AHEAD:
            oldest = self._running.popleft()
            if self._shared():
                with contextlib.suppress(RuntimeError):  # Its domain hears of it.
                    oldest.block_until_ready()

    def forget(self, who: Hashable) -> None:
        """Who has left; lets go of results, which may be theirs."""
        with self._changed:
            self._served.pop(who, None)
            self._running.clear()

    def _next(self) -> Hashable:
        return min(self._waiting, key=lambda who: self._served.get(who, 0))
