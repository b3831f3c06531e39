"""Looks at the pipeline while somebody looks at it: which steps are measured, and what they gave.

The step loop asks `next` at every boundary; a thread of this module does everything that takes
time. Nothing is measured unless somebody called `look` lately, and then only a small part of the
steps, so that looking does not slow down what is looked at.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from jaxserve.engine.view import MAX_SPANS, PipelineView, Transfers
from jaxserve.errors import EngineFailedError
from jaxserve.pipeline.probe import Measured
from jaxserve.pipeline.timeline import (
    AnyStage,
    Summary,
    merge,
    steady_window,
    summarise,
    typical_steps,
)

logger = logging.getLogger(__name__)

LOOK_SECONDS = 60.0
"""For so long after somebody looked, steps are measured: longer than Prometheus' usual interval."""
REST_SECONDS = 1.0
"""Between two times of measuring, at least."""
REST_FACTOR = 19.0
"""As much longer than measuring took: at most a twentieth of the time is measured."""
CLOSE_SECONDS, CLOSE_FACTOR = 3.0, 4.0
"""And for so long after a look, when a page looks every second: at most a fifth."""
STEPS = 4
"""Steps of each lane that are measured: before the first, the pipeline has something left; the last
one overlaps with what is not measured any more."""
KEPT = 64
"""Times of measuring whose expert counts are added up."""
TAKE_SECONDS = 5.0
"""How long what was measured may take to come together."""


class Probes(Protocol):
    """What the watch needs of this process's `pipeline.probe.Probe`."""

    def turn(self, on: bool) -> None: ...
    def take(self, timeout: float) -> Measured: ...
    def close(self) -> None: ...


Collect = Callable[[float], list[Measured]]
"""What the followers measured, within so many seconds; raises EngineFailedError."""


class Watch:
    """Measures now and then, while somebody looks.

    Args:
      probe: of this process.
      lanes: of the deployment.
      collect: gets what the followers measured; None: there are none.
      clock: seconds, monotonic.
    """

    def __init__(
        self,
        probe: Probes,
        lanes: int,
        collect: Collect | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._probe, self._collect, self._clock = probe, collect, clock
        self._boundaries = STEPS * lanes
        self._left = 0  # boundaries until the probes are turned off; 0: they are
        self._begun = 0.0
        self._ended = self._took = float("-inf")
        self._looked = float("-inf")
        self._processing = False
        self._view = PipelineView()
        self._totals: dict[AnyStage, Transfers] = {}
        self._counts: deque[dict[int, list[int]]] = deque(maxlen=KEPT)
        self._work: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def look(self) -> PipelineView:
        """What was measured last; for a while there will be news. From any thread, at once."""
        with self._lock:
            self._looked = self._clock()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="jaxserve-watch", daemon=True
                )
                self._thread.start()
        return self._view

    def next(self) -> bool:
        """Called by the step loop at every boundary: whether what follows is measured."""
        if self._left:
            self._left -= 1
            if not self._left:
                self._end()
            return self._left > 0
        now = self._clock()
        since = now - self._looked
        if since >= LOOK_SECONDS or self._processing:
            return False
        factor = CLOSE_FACTOR if since < CLOSE_SECONDS else REST_FACTOR
        if now < self._ended + max(REST_SECONDS, factor * self._took):
            return False
        self._begun, self._left = now, self._boundaries
        self._probe.turn(True)
        return True

    def idle(self) -> None:
        """Called by the step loop when there is nothing to do: what is measured is complete."""
        if self._left:
            self._left = 0
            self._end()

    def close(self) -> None:
        """Ends the threads; the step loop has ended before."""
        self._work.put(False)
        self._probe.close()

    def _end(self) -> None:
        self._probe.turn(False)
        self._processing = True
        self._work.put(True)

    def _run(self) -> None:
        while self._work.get():
            try:
                self._take()
            except Exception:
                logger.exception("the pipeline's figures")
            self._ended = self._clock()
            self._took = self._ended - self._begun
            self._processing = False

    def _take(self) -> None:
        """Turns what all processes measured into the next view."""
        measured, missing = [self._probe.take(TAKE_SECONDS)], ""
        if self._collect is not None:
            try:
                measured += self._collect(TAKE_SECONDS)
            except EngineFailedError as error:
                missing = str(error)
        spans = merge([part.spans for part in measured])
        self._counts.append(_sum(part.expert_tokens for part in measured))
        expert_tokens = _sum(self._counts)
        steps = {(span.lane, span.step) for span in spans}
        if len(steps) < STEPS:  # a request's few: no stretch of them is typical
            return
        summary = summarise(spans, steady_window(spans, typical_steps(spans)))
        shown = [s for s in spans if s.end_ns > summary.start_ns and s.start_ns < summary.end_ns]
        for stage in ("dispatch", "combine"):
            times = [span.milliseconds / 1e3 for span in shown if span.stage == stage]
            before = self._totals.get(stage, Transfers(0, 0.0))
            if times:
                after = Transfers(before.messages + len(times), before.seconds + sum(times))
                self._totals[stage] = after
        busy, bubble = _fractions(summary)
        self._view = PipelineView(
            measured_at=summary.end_ns / 1e9,
            window_seconds=summary.milliseconds / 1e3,
            steps=summary.steps,
            busy=busy,
            bubble=bubble,
            timeline=shown[:MAX_SPANS],
            timeline_cut=len(shown) > MAX_SPANS,
            transfers=dict(self._totals),
            expert_tokens=expert_tokens,
            imbalance=imbalance(expert_tokens),
            missing=missing,
        )


def _fractions(summary: Summary) -> tuple[dict[AnyStage, float], float | None]:
    """Busy fractions of the stages that were seen, and the bubble if both sides were."""
    busy = {stage: times.busy for stage, times in summary.stages.items() if times.count}
    if "step" in busy:
        return busy, 1.0 - busy["step"]
    return busy, summary.bubble if {"attend", "ffn"} <= set(busy) else None


def _sum(counts: Any) -> dict[int, list[int]]:
    """Layer → the sums of several counts, expert by expert."""
    totals: dict[int, list[int]] = {}
    for layers in counts:
        for layer, tokens in layers.items():
            before = totals.get(layer, [0] * len(tokens))
            totals[layer] = [a + b for a, b in zip(before, tokens, strict=True)]
    return dict(sorted(totals.items()))


def imbalance(expert_tokens: dict[int, list[int]]) -> float | None:
    """The busiest expert's tokens over the mean, averaged over the layers that had any.

    1: all experts are equally busy; their number: one gets everything. None: no tokens.
    """
    ratios = [max(t) * len(t) / sum(t) for t in expert_tokens.values() if sum(t)]
    return sum(ratios) / len(ratios) if ratios else None
