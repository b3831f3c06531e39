"""Passes of a message server, one after the other: messages wait here for the policy's decision.

Threads of connections put messages in. One thread of the server takes batches out and enqueues
their answers on the devices. Knows nothing of ffn.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

import jax

from jaxserve.link.remote.batching import Turns, Waiting
from jaxserve.link.remote.cohorts import Cohorts

AHEAD = 1
"""Passes in the devices' queues beside the running one: enough to keep the devices busy."""
LONGEST_SECONDS = 1.0
"""Longest time without another look, whatever the policy says."""

POLICIES: Mapping[str, Callable[[int], Turns]] = {
    "rotation": lambda most: Turns(),
    "merge": Turns,
    "cohort": Cohorts,
}
"""Policies by `link.batching`, made for the most messages that a pass may have."""


class Passes:
    """Queue of messages; called from any thread, except `take` and `enqueued`, from one.

    Devices work in the order of enqueueing. So while several domains share them, at most `AHEAD`
    passes wait behind the running one, and no domain waits for a long queue of another.

    Args:
      policy: decides; asked under a lock.
      shared: whether several domains are connected.
    """

    def __init__(self, policy: Turns, shared: Callable[[], bool]):
        self._policy, self._shared = policy, shared
        self._changed = threading.Condition()
        self._running: deque[tuple[Sequence[Waiting], jax.Array]] = deque()
        self._actions: deque[tuple[Callable[[], None], Future[float]]] = deque()
        self._closed = False

    def put(self, message: Waiting) -> None:
        """Takes a message that has arrived."""
        with self._changed:
            if self._policy.put(message, time.monotonic()):
                self._changed.notify_all()

    def take(self) -> Sequence[Any]:
        """Waits for the next batch, to be followed by `enqueued`; empty after `close`."""
        while True:
            with self._changed:
                now = time.monotonic()
                action = self._actions.popleft() if self._actions else None
                if action is None:
                    decision = self._policy.take(now, idle=not self._running)
                    if decision.batch or self._closed:
                        return decision.batch
                    if not self._running:
                        self._changed.wait(min(decision.at - now, LONGEST_SECONDS))
                        continue
            # Without the lock, so that messages can be put while a pass is waited for.
            if action is None:
                self._finish()
            else:
                _carry_out(*action)

    def enqueued(self, batch: Sequence[Waiting], result: jax.Array | None) -> None:
        """Notes the result of the batch that was taken last, None if it failed. If domains share
        the devices, waits until their queue is short."""
        if result is not None and self._shared():
            self._running.append((batch, result))
            while len(self._running) > AHEAD:
                self._finish()
        # A single domain competes with nobody: its passes count as served once they are enqueued.
        if not self._shared():
            with self._changed:
                self._policy.served(batch, time.monotonic())

    def between(self, action: Callable[[], None]) -> float:
        """Carries an action out between two passes, on the thread that takes them, and returns the
        seconds that it took: XLA on CPUs keeps the order of one thread's programs alone, and the
        collectives of an action and of a pass on two threads would mix.

        Raises:
          CancelledError: the queue is closed.
        """
        done: Future[float] = Future()
        with self._changed:
            if self._closed:
                raise CancelledError
            self._actions.append((action, done))
            self._changed.notify_all()
        return done.result()

    def forget(self, domain: Hashable) -> None:
        """Forgets a domain that has left."""
        with self._changed:
            self._policy.forget(domain)

    def close(self) -> None:
        """Ends `take`."""
        with self._changed:
            self._closed = True
            while self._actions:
                self._actions.popleft()[1].cancel()
            self._changed.notify_all()

    def _finish(self) -> None:
        """Waits for the oldest pass."""
        batch, result = self._running.popleft()
        with contextlib.suppress(RuntimeError):  # Sending the answers reports it.
            result.block_until_ready()
        with self._changed:
            self._policy.served(batch, time.monotonic())


def _carry_out(action: Callable[[], None], done: "Future[float]") -> None:
    begin = time.monotonic()
    try:
        action()
    except Exception as error:
        done.set_exception(error)
    else:
        done.set_result(time.monotonic() - begin)
