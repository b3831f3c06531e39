"""Spans: when each stage of a step ran. `merge` joins the spans that several processes measured.

Only completions are measured; starts are inferred. A span starts when everything it depends on was
available: its input (attend → dispatch → ffn → combine → the next layer's attend of the same lane),
the mesh or link direction (the previous span of the same stage), and the host (the stage was
enqueued). In colocated mode the only stage is the whole `step`. Knows neither schedule, transport
nor JAX.
"""

from collections.abc import Iterable
from typing import Literal, get_args

import msgspec

from jaxserve.roles.layout import StepLoad

AFDStage = Literal["attend", "dispatch", "ffn", "combine"]
STAGES: tuple[AFDStage, ...] = get_args(AFDStage)
AnyStage = AFDStage | Literal["step"]
"""The stages of AFD, and the only stage of colocated mode, where a step is one program."""
_INPUT: dict[AnyStage, AnyStage] = {
    "attend": "combine",
    "dispatch": "attend",
    "ffn": "dispatch",
    "combine": "ffn",
}


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

    @property
    def milliseconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


def merge(span_lists: Iterable[Iterable[Span]]) -> list[Span]:
    """Joins the spans of several processes, sorted by start, and infers every start anew.

    A process observes only its own stages, so it cannot know when the other role's output was
    ready. The processes' clocks are assumed to agree; a span whose input appears to end after it
    gets length 0.
    """
    spans = [span for spans in span_lists for span in spans]
    ends = {(span.stage, span.lane, span.step, span.layer): span.end_ns for span in spans}
    free: dict[AnyStage, int] = {}
    merged = []
    for span in sorted(spans, key=lambda span: (span.end_ns, span.enqueued_ns)):
        layer = span.layer - 1 if span.stage == "attend" else span.layer
        source = _INPUT.get(span.stage)
        ready = ends.get((source, span.lane, span.step, layer), 0) if source else 0
        start = min(max(span.enqueued_ns, ready, free.get(span.stage, 0)), span.end_ns)
        free[span.stage] = span.end_ns
        merged.append(msgspec.structs.replace(span, start_ns=start))
    return sorted(merged, key=lambda span: (span.start_ns, span.end_ns))
