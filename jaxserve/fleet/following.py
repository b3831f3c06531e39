"""Follows the leader in every process of a runtime but the first.

A follower has the same runtime over the same deployment as the leader (`leading.py`), and no engine
(`assembly.open_follower`). `control.py` defines the messages between the two.
"""

import queue
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import msgspec

from jaxserve.engine.runtime import Driver, Runtime
from jaxserve.fleet.collected import COUNTS, MEASURED, SPANS, Counts
from jaxserve.fleet.control import Position
from jaxserve.fleet.follower import Follower
from jaxserve.observe.probe import TAKE_SECONDS, Probe
from jaxserve.observe.recorder import Recorder
from jaxserve.roles.actions import ReadPages, WritePages
from jaxserve.roles.expert_slots import ExpertSlots, counts_of_ranks

if TYPE_CHECKING:
    from jaxserve.roles.page_transfer import PageAccess


class Following:
    """Runs the leader's plans on a warm runtime, after telling the leader that it is ready.

    Args:
      pages: access to the pages for hand-offs, one for each domain.
    """

    def __init__(
        self,
        runtime: Runtime,
        follower: Follower,
        recorder: Recorder | None = None,
        pages: "Sequence[PageAccess]" = (),
    ):
        self._driver, self._follower, self._pages = runtime.driver, follower, pages
        driver = self._driver
        follower.position = lambda: position(driver)
        if recorder is not None:
            follower.answer(SPANS, lambda: _spans(recorder))
        probe = self._probe = Probe(driver, jax.process_index())
        follower.answer(MEASURED, lambda: msgspec.msgpack.encode(probe.take(TAKE_SECONDS / 2)))
        follower.answer(COUNTS, lambda: own_counts(driver.slots))
        self._completions = Completions(follower)
        follower.ready()

    def run(self) -> None:
        """Runs the leader's plans until it shuts the deployment down.

        Raises:
          EngineFailedError: the leader is gone or sent something invalid.
        """
        driver = self._driver
        for boundary in self._follower.boundaries():
            self._probe.turn(boundary.measured)
            for action in boundary.actions:
                if isinstance(action, ReadPages | WritePages):
                    if self._pages:
                        self._pages[action.domain].follow(action)
                elif driver.slots is not None:
                    driver.slots.carry_out(action)
            for plan in boundary.plans:
                driver.begin(plan)
            last = driver.advance().last if driver.active else None
            self._completions.put(boundary.number, last)


def own_counts(slots: ExpertSlots | None) -> bytes:
    """Encodes this process's part of the counts; waits for the devices."""
    if slots is None:
        return msgspec.msgpack.encode(Counts(None))
    if (taken := slots.counted) is None:
        return msgspec.msgpack.encode(Counts(-1))
    own = counts_of_ranks(taken.counts)
    ranks = {rank: part.astype("<u4").tobytes() for rank, part in own.items()}
    return msgspec.msgpack.encode(Counts(taken.number, len(slots.layers), ranks, slots.unread))


def position(driver: Driver) -> Position | None:
    """Returns the driver's position in the schedule, for heartbeats and errors."""
    at = driver.position()
    return None if at is None else Position(*at)


def _spans(recorder: Recorder) -> bytes:
    recorder.flush(5.0)
    return msgspec.msgpack.encode(recorder.spans())


class Completions:
    """Reports boundaries that are done on the devices to the leader, from a thread of its own."""

    def __init__(self, follower: Follower):
        self._follower = follower
        self._queue: queue.SimpleQueue[tuple[int, jax.Array | None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="jaxserve-completions", daemon=True).start()

    def put(self, number: int, last: Any) -> None:
        """Queues boundary `number`, which is done once `last` is ready; None: it had no step."""
        self._queue.put((number, last))

    def _run(self) -> None:
        while True:
            number, last = self._queue.get()
            try:
                if last is not None:
                    last.block_until_ready()
            except Exception as error:
                self._follower.fail(f"{type(error).__name__}: {error}")
                return
            self._follower.completed(number)
