"""What all processes of a runtime but the first do once they have joined: follow the leader.

It has the same runtime over the same deployment as the leader (`leading.py`), and no engine; what
the two send each other is in `control.py`.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import msgspec

from jaxserve.checkpoint.fingerprint import weights_digest
from jaxserve.config.deployment import Deployment
from jaxserve.engine.runtime import BuildRuntime, warm_up
from jaxserve.fleet.collected import COUNTS, MEASURED, SPANS, Counts
from jaxserve.fleet.control import Position
from jaxserve.fleet.follower import Follower
from jaxserve.observe.probe import TAKE_SECONDS, Probe
from jaxserve.observe.recorder import Recorder
from jaxserve.roles.actions import ReadPages, WritePages
from jaxserve.roles.expert_slots import ExpertSlots, counts_of_ranks

if TYPE_CHECKING:
    from jaxserve.roles.cell import Cell
    from jaxserve.roles.colocated import ColocatedWorker
    from jaxserve.roles.page_transfer import PageAccess


def follow(
    deployment: Deployment,
    follower: Follower,
    *,
    build: BuildRuntime,
    recorder: Recorder | None = None,
    on_ready: Callable[[], None] = lambda: None,
    pages: "Callable[[Cell | ColocatedWorker], Sequence[PageAccess]]" = lambda driver: (),
) -> None:
    """Runs the leader's plans until it shuts the deployment down.

    Args:
      build: makes the runtime.
      pages: what makes this process's part of the pages that are handed over, one a domain.

    Raises:
      EngineFailedError: the leader is gone or sent something invalid.
      ConfigError, CheckpointError: this process cannot load its part.
    """
    runtime = build(deployment, observer=recorder)
    follower.wait_warm_up(weights_digest(deployment.model))
    warm_up(runtime)
    driver = runtime.driver
    accesses = pages(driver)
    follower.position = lambda: position(driver)
    if recorder is not None:
        follower.answer(SPANS, lambda: _spans(recorder))
    probe = Probe(driver, jax.process_index())
    follower.answer(MEASURED, lambda: msgspec.msgpack.encode(probe.take(TAKE_SECONDS / 2)))
    follower.answer(COUNTS, lambda: _counts(driver.slots))
    completions = _Completions(follower)
    follower.ready()
    on_ready()
    for boundary in follower.boundaries():
        probe.turn(boundary.measured)
        for action in boundary.actions:
            if isinstance(action, ReadPages | WritePages):
                if accesses:
                    accesses[action.domain].follow(action)
            elif driver.slots is not None:
                driver.slots.carry_out(action)
        for plan in boundary.plans:
            driver.begin(plan)
        completions.put(boundary.number, driver.advance().last if driver.active else None)


def _counts(slots: ExpertSlots | None) -> bytes:
    if slots is None:
        return msgspec.msgpack.encode(Counts(None))
    if (taken := slots.counted) is None:
        return msgspec.msgpack.encode(Counts(-1))
    own = counts_of_ranks(taken.counts)
    ranks = {rank: part.astype("<u4").tobytes() for rank, part in own.items()}
    return msgspec.msgpack.encode(Counts(taken.number, len(slots.layers), ranks, slots.unread))


def position(driver: "Cell | ColocatedWorker") -> Position | None:
    """Where the driver is in the schedule, for heartbeats and errors."""
    at = driver.position()
    return None if at is None else Position(*at)


def _spans(recorder: Recorder) -> bytes:
    recorder.flush(5.0)
    return msgspec.msgpack.encode(recorder.spans())


class _Completions:
    """Tells the leader which boundaries are done on the devices, from a thread of its own."""

    def __init__(self, follower: Follower):
        self._follower = follower
        self._queue: queue.SimpleQueue[tuple[int, jax.Array | None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="jaxserve-completions", daemon=True).start()

    def put(self, number: int, last: Any) -> None:
        """`last` is there when boundary `number` is done; None: it had no step."""
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
