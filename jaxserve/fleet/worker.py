"""What a process does once it has joined: process 0 leads an engine, the others follow its plans.

Both build the same runtime over the same deployment. Called by `serve.py` and the bench; what the
processes send each other is in `control.py`.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import msgspec
import numpy as np

from jaxserve.config.deployment import Deployment
from jaxserve.engine.build import build_engine, build_runtime
from jaxserve.engine.engine import Engine
from jaxserve.engine.runtime import warm_up
from jaxserve.errors import EngineFailedError
from jaxserve.fleet.control import Boundary, Position, shapes_digest
from jaxserve.fleet.follower import Follower
from jaxserve.fleet.leader import Leader
from jaxserve.observe.probe import Measured, Probe
from jaxserve.observe.timeline import Recorder, Span
from jaxserve.observe.watch import TAKE_SECONDS
from jaxserve.roles.actions import Action, ReadPages, WritePages
from jaxserve.roles.cell import Cell
from jaxserve.roles.colocated import ColocatedWorker
from jaxserve.roles.expert_slots import ExpertSlots, counts_of_ranks
from jaxserve.roles.step_plan import StepPlan
from jaxserve.roles.worker import Observer

if TYPE_CHECKING:
    from jaxserve.roles.page_transfer import PageAccess

SPANS = "spans"
"""Name under which followers keep their measured spans."""
COUNTS = "counts"
"""What experts got, when that was last asked for."""
MEASURED = "measured"
"""And what their probes measured."""


def lead(
    deployment: Deployment,
    leader: Leader,
    *,
    observer: Observer | None = None,
    prepare: Callable[[Engine], object] = lambda engine: None,
) -> Engine:
    """A warm, running engine that sends every boundary to all followers first; `prepare` is called
    before it is started.

    Raises:
      EngineFailedError: a follower failed, or did not get ready in time.
    """
    digest = leader.identity.digest
    number = 0

    def broadcast(plans: list[StepPlan], measured: bool, actions: Sequence[Action]) -> None:
        nonlocal number
        shapes = shapes_digest(digest, plans)
        leader.broadcast(Boundary(number, plans, shapes, measured, list(actions)))
        number += 1

    engine = build_engine(
        deployment,
        observer=observer,
        broadcast=broadcast,
        explain=leader.explain,
        meet=leader.begin_warm_up,
        collect=lambda timeout: collect_measured(leader, timeout),
        counts=lambda number, timeout: collect_counts(leader, number, timeout),
        prepare=prepare,
    )
    leader.wait_ready()
    engine.start()
    return engine


def follow(
    deployment: Deployment,
    follower: Follower,
    *,
    recorder: Recorder | None = None,
    on_ready: Callable[[], None] = lambda: None,
    pages: Callable[[Cell | ColocatedWorker], "Sequence[PageAccess]"] = lambda driver: (),
) -> None:
    """Runs the leader's plans until it shuts the deployment down.

    Args:
      pages: what makes this process's part of the pages that are handed over, one a domain.

    Raises:
      EngineFailedError: the leader is gone or sent something invalid.
      ConfigError, CheckpointError: this process cannot load its part.
    """
    runtime = build_runtime(deployment, observer=recorder)
    follower.wait_warm_up()
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


def collect_spans(leader: Leader, timeout: float) -> list[list[Span]]:
    """The measured spans of every follower."""
    return [
        msgspec.msgpack.decode(data, type=list[Span])
        for data in leader.collect(SPANS, timeout).values()
    ]


def collect_measured(leader: Leader, timeout: float) -> list[Measured]:
    """What the probe of every follower measured.

    Raises:
      EngineFailedError: one did not answer in time; names it.
    """
    answers = leader.collect(MEASURED, timeout)
    return [msgspec.msgpack.decode(data, type=Measured) for data in answers.values()]


def collect_counts(leader: Leader, number: int, timeout: float) -> dict[int, np.ndarray]:
    """The counts of that number that followers have, by rank.

    Raises:
      EngineFailedError: one did not answer in time, or has not got so far; names it.
    """
    deadline = time.monotonic() + timeout
    while True:
        left = max(0.1, deadline - time.monotonic())
        parts = [
            msgspec.msgpack.decode(data, type=_Counts)
            for data in leader.collect(COUNTS, left).values()
        ]
        if all(part.number in (None, number) for part in parts):
            return {
                rank: np.frombuffer(data, "<u4").reshape(part.layers, -1)
                for part in parts
                for rank, data in part.ranks.items()
            }
        if time.monotonic() > deadline:
            raise EngineFailedError(f"the counts of experts did not come within {timeout:g} s")
        time.sleep(0.05)


class _Counts(msgspec.Struct, frozen=True):
    """A follower's part of the counts."""

    number: int | None
    """None: it has no experts."""
    layers: int = 0
    ranks: dict[int, bytes] = {}


def _counts(slots: ExpertSlots | None) -> bytes:
    if slots is None:
        return msgspec.msgpack.encode(_Counts(None))
    number, counted = slots.counted or (-1, None)
    own = {} if counted is None else counts_of_ranks(counted)
    ranks = {rank: part.astype("<u4").tobytes() for rank, part in own.items()}
    return msgspec.msgpack.encode(_Counts(number, len(slots.layers), ranks))


def position(driver: Cell | ColocatedWorker) -> Position | None:
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
