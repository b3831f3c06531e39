"""What process 0 of a runtime does once all have joined: it leads an engine.

Called by `serve.py` and the bench; the others follow its plans (`following.py`).
"""

import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from jaxserve.checkpoint.fingerprint import weights_digest
from jaxserve.config.deployment import Deployment
from jaxserve.engine.engine import Engine
from jaxserve.engine.first_token import start_checked
from jaxserve.engine.make_engine import warm_engine
from jaxserve.engine.runtime import BuildRuntime
from jaxserve.errors import EngineFailedError
from jaxserve.fleet.collected import COUNTS, MEASURED, SPANS, Counts
from jaxserve.fleet.control import Boundary, shapes_digest
from jaxserve.fleet.leader import Leader
from jaxserve.observe.probe import Measured
from jaxserve.observe.spans import Span
from jaxserve.roles.actions import Action
from jaxserve.roles.expert_moves import Counted
from jaxserve.roles.step_plan import StepPlan
from jaxserve.roles.worker import Observer


def lead(
    deployment: Deployment,
    leader: Leader,
    *,
    build: BuildRuntime,
    observer: Observer | None = None,
    prepare: Callable[[Engine], object] = lambda engine: None,
) -> Engine:
    """A warm, running engine that sends every boundary to all followers first; `prepare` is called
    before it is started.

    Args:
      build: makes the runtime.

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

    engine = warm_engine(
        deployment,
        build,
        observer=observer,
        broadcast=broadcast,
        explain=leader.explain,
        meet=lambda: leader.begin_warm_up(weights_digest(deployment.model)),
        collect=lambda timeout: collect_measured(leader, timeout),
        counts=lambda number, timeout: collect_counts(leader, number, timeout),
        prepare=prepare,
    )
    leader.wait_ready()
    start_checked(engine)
    return engine


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


def collect_counts(leader: Leader, number: int, timeout: float) -> Counted:
    """Returns the counts of that number that followers have.

    Raises:
      EngineFailedError: one did not answer in time, or has not got so far; names it.
    """
    deadline = time.monotonic() + timeout
    while True:
        left = max(0.1, deadline - time.monotonic())
        parts = [
            msgspec.msgpack.decode(data, type=Counts)
            for data in leader.collect(COUNTS, left).values()
        ]
        if all(part.number in (None, number) for part in parts):
            ranks = {
                rank: np.frombuffer(data, "<u4").reshape(part.layers, -1)
                for part in parts
                for rank, data in part.ranks.items()
            }
            return Counted(ranks, unread="; ".join(part.unread for part in parts if part.unread))
        if time.monotonic() > deadline:
            raise EngineFailedError(f"the counts of experts did not come within {timeout:g} s")
        time.sleep(0.05)
