"""The figures that metrics and the live view show of the pipeline.

Made by `watch.py`, read by the server, from any thread. Every figure is a sample of some steps.
"""

from typing import NamedTuple

import msgspec

from jaxserve.observe.spans import AnyStage, Span
from jaxserve.roles.expert_view import ExpertView

MAX_SPANS = 2048
"""Most spans of a timeline."""


class Transfers(NamedTuple):
    """Running totals of the measured messages of one direction."""

    messages: int
    seconds: float


class FFNWorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """Work since the start of an ffn worker that has a runtime of its own."""

    name: str = ""
    """Address of the worker, as attention workers know it."""
    passes: int = 0
    """Passes through a layer's FFN."""
    messages: int = 0
    """Messages of all passes."""
    rows: int = 0
    """Rows of all passes, with the padding of messages."""
    places: int = 0
    """Most messages that these passes could have had: one of each domain."""
    left_behind: int = 0
    """Messages that came after their cohort had gone on."""
    misjudged: float = 0.0
    """Seconds between the predicted and the real arrival of a message, moving mean."""


class PipelineView(msgspec.Struct, frozen=True, kw_only=True):
    """The latest measurement. Everything in it is a sample of some steps."""

    measured_at: float | None = None
    """Unix time of the measurement; None before the first one."""
    window_seconds: float = 0.0
    """The window of whole steps to which the fractions refer."""
    steps: int = 0
    """Steps in it, over all lanes."""
    busy: dict[AnyStage, float] = {}
    """Share of the window in which each stage ran; colocated, a whole step is one stage."""
    bubble: float | None = None
    """1 − the busier role's share: 0 where that role never waits. None where a role is missing."""
    timeline: list[Span] = []
    """The stages in the window, by start."""
    timeline_cut: bool = False
    """Whether there were more than `MAX_SPANS`."""
    transfers: dict[AnyStage, Transfers] = {}
    ffn: list[FFNWorkerView] = []
    """ffn workers of other runtimes."""
    experts: ExpertView | None = None
    """Placement and load of experts, counted all the time; None if another runtime has them."""
    missing: str = ""
    """Processes whose figures are missing, and why."""
