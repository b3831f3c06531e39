"""Joins the spans that several processes measured, and infers when each stage began.

Only completions are measured. A span starts when everything it depends on was available: its input
(attend → dispatch → ffn → combine → the next layer's attend of the same lane), the mesh or link
direction (the previous span of the same stage), and the host (the stage was enqueued).
"""

from collections.abc import Iterable

import msgspec

from jaxserve.observe.spans import AnyStage, Span

_INPUT: dict[AnyStage, AnyStage] = {
    "attend": "combine",
    "dispatch": "attend",
    "ffn": "dispatch",
    "combine": "ffn",
}


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


def answered(passes: Iterable[Span], spans: Iterable[Span]) -> list[Span]:
    """Gives passes of an ffn worker, which knows no lanes, lane and step of the message that each
    answered: it ended between the message's attend and the end of its combine. Lane -1: the message
    was another attention worker's.

    Args:
      spans: the attention worker's own.
    """
    ends = {(span.stage, span.layer, span.lane, span.step): span.end_ns for span in spans}
    open_: dict[int, list[tuple[int, int, int, int]]] = {}
    for (stage, layer, lane, step), end in ends.items():
        sent = ends.get(("attend", layer, lane, step))
        if stage == "combine" and sent is not None:
            open_.setdefault(layer, []).append((sent, end, lane, step))
    found = []
    for one in passes:
        own = (at for at in open_.get(one.layer, ()) if at[0] <= one.end_ns <= at[1])
        _, _, lane, step = next(own, (0, 0, -1, one.step))
        found.append(msgspec.structs.replace(one, lane=lane, step=step))
    return found
