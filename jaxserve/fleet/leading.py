"""Represents a leader's followers to its engine.

`assembly.open_engine` hands them to the engine; `following.py` is the followers' end.
"""

import functools
from collections.abc import Sequence

import msgspec

from jaxserve.fleet.control import MEASURED, SPANS, Boundary, collect_counts, shapes_digest
from jaxserve.fleet.leader import Leader
from jaxserve.observe.spans import Span
from jaxserve.roles.step_plan import StepPlan
from jaxserve.roles.worker import Action


class LedFollowers:
    """Sends boundaries to all followers and collects from them (`engine.stepper.Followers`)."""

    def __init__(self, leader: Leader):
        self._leader = leader
        self._number = 0
        self.explain = leader.explain
        self.counts = functools.partial(collect_counts, leader)

    def broadcast(self, plans: list[StepPlan], measured: bool, actions: Sequence[Action]) -> None:
        """Sends the next boundary, before the driver runs it."""
        shapes = shapes_digest(self._leader.identity.digest, plans)
        boundary = Boundary(self._number, plans, shapes, measured, list(actions))
        self._leader.broadcast(boundary)
        self._number += 1

    def measured(self, timeout: float) -> list[list[Span]]:
        """Returns the spans of every follower's probe; raises as `collect_spans`."""
        return collect_spans(self._leader, timeout, MEASURED)


def collect_spans(leader: Leader, timeout: float, name: str = SPANS) -> list[list[Span]]:
    """Returns the measured spans of every follower.

    Args:
      name: `SPANS`, those of the whole run, or `MEASURED`, those of the probe.

    Raises:
      EngineFailedError: one did not answer in time; names it.
    """
    answers = leader.collect(name, timeout).values()
    return [msgspec.msgpack.decode(data, type=list[Span]) for data in answers]
