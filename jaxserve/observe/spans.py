"""Spans: when each stage of a step ran. In colocated mode the only stage is the whole `step`.

`merging.py` joins the spans of several processes. Knows neither schedule, transport nor JAX.
"""

from typing import Literal, NamedTuple, get_args

import msgspec

from jaxserve.roles.layout import StepLoad

AFDStage = Literal["attend", "dispatch", "ffn", "combine"]
STAGES: tuple[AFDStage, ...] = get_args(AFDStage)
AnyStage = AFDStage | Literal["step"]
"""The stages of AFD, and the only stage of colocated mode, where a step is one program."""


class PassFill(NamedTuple):
    """Messages of a pass of an ffn worker that has a runtime of its own."""

    messages: int
    places: int
    """Most messages that it could have had: one of each domain."""
    left_behind: int
    """Lanes without which their cohort went on."""


class Span(msgspec.Struct, frozen=True, gc=False):
    """One stage of one layer, lane and step; times in nanoseconds since the epoch."""

    stage: AnyStage
    lane: int
    layer: int
    """The attend after the last layer is the step's `leave`: last sum, head and sampling."""
    step: int
    """The step plan's number."""
    start_ns: int
    end_ns: int
    process: int
    """Index of the process that observed its end."""
    enqueued_ns: int
    """When its enqueueing began; it cannot have started earlier."""
    load: StepLoad | None = None
    """The work of its step."""
    fill: PassFill | None = None

    @property
    def milliseconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6
