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


class DomainShare(NamedTuple):
    """One domain's part of the latest measurement."""

    domain: int
    steps: int
    """Steps that have stages in the window."""
    busy: dict[AnyStage, float]
    """Time of the stages of its lanes, divided by the time of the window."""


class PipelineView(msgspec.Struct, frozen=True, kw_only=True):
    """The latest measurement. Everything in it is a sample of some steps."""

    measured_at: float | None = None
    """Unix time of the measurement; None before the first one."""
    window_seconds: float = 0.0
    """The window of whole steps to which the fractions refer."""
    steps: int = 0
    """Steps in it, over all lanes."""
    busy: dict[AnyStage, float] = {}
    """Share of the window in which each measured stage ran. In colocated mode the only stage is the
    whole step."""
    bubble: float | None = None
    """1 − the busier role's share: 0 where that role never waits. None where a role is missing."""
    timeline: list[Span] = []
    """The stages in the window, by start."""
    timeline_cut: bool = False
    """Whether there were more than `MAX_SPANS`."""
    domains: list[DomainShare] = []
    transfers: dict[AnyStage, Transfers] = {}
    experts: ExpertView | None = None
    """Placement and load of experts, counted all the time; None if another runtime has them."""
    missing: str = ""
    """Processes whose figures are missing, and why."""
