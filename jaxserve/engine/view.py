"""What the pipeline looked like: figures that metrics and the live view show.

Made by `watch.py`, read by the server, from any thread. Every figure is a sample of some steps.
"""

from typing import NamedTuple

import msgspec

from jaxserve.pipeline.timeline import AnyStage, Span

MAX_SPANS = 2048
"""Of a timeline."""


class Transfers(NamedTuple):
    """Messages of one direction whose transfer was measured since the start."""

    messages: int
    seconds: float


class PipelineView(msgspec.Struct, frozen=True, kw_only=True):
    """What the steps measured last looked like. Everything in it is a sample of some steps."""

    measured_at: float | None = None
    """Seconds of the epoch; None: nothing was measured yet."""
    window_seconds: float = 0.0
    """The stretch of whole steps that the fractions are of."""
    steps: int = 0
    """Steps in it, over all lanes."""
    busy: dict[AnyStage, float] = {}
    """The share of the window in which a stage ran; of stages that nobody measured nothing. In
    colocated mode the only stage is the whole step."""
    bubble: float | None = None
    """1 − the busier side's share: 0 where one side never waits. None where a side is missing."""
    timeline: list[Span] = []
    """The stages in the window, by start."""
    timeline_cut: bool = False
    """Whether there were more than `MAX_SPANS`."""
    transfers: dict[AnyStage, Transfers] = {}
    expert_tokens: dict[int, list[int]] = {}
    """Layer → tokens of each expert, over some dozens of times of measuring."""
    imbalance: float | None = None
    """The busiest expert's tokens over the mean, averaged over the layers with experts."""
    missing: str = ""
    """Whose figures did not come, and why."""
