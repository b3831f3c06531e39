"""How busy both roles were: turns measured spans into fractions.

Called by the live view (`watch.py`) and by everything that draws or reports a timeline;
`timeline_view.py` draws it.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from jaxserve.observe.spans import STAGES, AnyStage, Span


class StageSummary(msgspec.Struct, frozen=True):
    """Durations of one stage's spans."""

    count: int
    median_ms: float
    p90_ms: float
    busy: float
    """Share of the window in which a span of this stage was running."""


class Summary(msgspec.Struct, frozen=True):
    """How busy the stages were in a window of the timeline."""

    start_ns: int
    end_ns: int
    lanes: int
    steps: int
    """Number of steps with an attend that ended in the window, over all lanes."""
    attention_busy: float
    """Share of the window in which the attention mesh ran an attend."""
    ffn_busy: float
    """Share of the window in which the ffn mesh ran an ffn."""
    bubble: float
    """1 − the busier role's share: 0 when that role never waits, which no schedule can beat."""
    stages: dict[AnyStage, StageSummary]
    """Durations of every stage of AFD, or of `step`."""

    @property
    def milliseconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


def steady_window(spans: Sequence[Span], steps: int = 1) -> tuple[int, int]:
    """The window (start_ns, end_ns) of a typical run of `steps` consecutive steps.

    A window goes from the start of a step of the lowest lane to the start of a later one. Of all
    windows without the lane's first or last step, the one of median length is returned, which
    excludes compilations and pauses between requests, and a recording's first stages, whose starts
    cannot be told from those of stages before it. Of a recording with fewer steps between its first
    and last one: a window of those. With none in between: all spans.
    """
    if not spans:
        return 0, 0
    whole = min(span.start_ns for span in spans), max(span.end_ns for span in spans)
    begun = [s for s in spans if s.stage in ("attend", "step") and s.layer == 0]
    lane = min((span.lane for span in begun), default=0)
    starts = {span.step: span.start_ns for span in begun if span.lane == lane}
    inner = sorted(starts.values())[1:]
    steps = max(1, min(steps, len(inner) - 1))
    stretches = [(inner[i], inner[i + steps]) for i in range(len(inner) - steps)]
    if not stretches:
        return whole
    stretches.sort(key=lambda stretch: stretch[1] - stretch[0])
    return stretches[len(stretches) // 2]


def summarise(spans: Sequence[Span], window: tuple[int, int] | None = None) -> Summary:
    """Busy fractions and durations of the spans in a window (start_ns, end_ns).

    Fractions count the parts of spans that lie in the window; durations are those of the spans
    that end in it. Without a window: from the first start to the last end.
    """
    if window is None:
        begin = min((span.start_ns for span in spans), default=0)
        window = begin, max((span.end_ns for span in spans), default=begin)
    begin, finish = window
    ending = [span for span in spans if begin < span.end_ns <= finish]
    stages: dict[AnyStage, StageSummary] = {}
    found = {span.stage for span in spans}
    for stage in (*STAGES, *sorted(found.difference(STAGES))):
        times = sorted(span.milliseconds for span in ending if span.stage == stage)
        stages[stage] = StageSummary(
            count=len(times),
            median_ms=statistics.median(times) if times else 0.0,
            p90_ms=times[math.ceil(0.9 * len(times)) - 1] if times else 0.0,
            busy=_busy([span for span in spans if span.stage == stage], begin, finish),
        )
    attention, ffn = stages["attend"].busy, stages["ffn"].busy
    return Summary(
        start_ns=begin,
        end_ns=finish,
        lanes=len({span.lane for span in ending}),
        steps=len({(s.lane, s.step) for s in ending if s.stage in ("attend", "step")}),
        attention_busy=attention,
        ffn_busy=ffn,
        bubble=1.0 - max(attention, ffn),
        stages=stages,
    )


def typical_steps(spans: Iterable[Span], limit: int = 72) -> int:
    """How many steps of each lane to draw: 1 to 3.

    As many as keep the picture within `limit` attends over all lanes.
    """
    attends = Counter((span.lane, span.step) for span in spans if span.stage == "attend")
    lanes = len({lane for lane, _ in attends})
    a_round = lanes * max(attends.values(), default=1)
    return max(1, min(3, limit // max(1, a_round)))


def _busy(spans: Iterable[Span], begin: int, finish: int) -> float:
    """The share of [begin, finish] that at least one of the spans covers."""
    if finish <= begin:
        return 0.0
    covered, reached = 0, begin
    for span in sorted(spans, key=lambda span: span.start_ns):
        start, end = max(span.start_ns, reached), min(span.end_ns, finish)
        if end > start:
            covered += end - start
            reached = end
    return covered / (finish - begin)
