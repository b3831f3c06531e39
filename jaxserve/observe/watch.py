"""Samples the pipeline while a client watches: decides which steps are measured, and keeps the
results.

The step loop calls `next` at every boundary; everything slow runs on a thread of this module.
Nothing is measured unless `look` was called recently, and then only a small share of the steps, so
that observation does not slow the pipeline down.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable

from jaxserve.errors import EngineFailedError
from jaxserve.observe.merging import answered, merge
from jaxserve.observe.probe import TAKE_SECONDS, Probe
from jaxserve.observe.spans import AnyStage, Span
from jaxserve.observe.timeline import Summary, steady_window, summarise, typical_steps
from jaxserve.observe.view import MAX_SPANS, FFNWorkerView, PipelineView, Transfers

logger = logging.getLogger(__name__)

LOOK_SECONDS = 60.0
"""Seconds after a look during which steps are measured; longer than Prometheus' usual interval."""
REST_SECONDS = 1.0
"""Least seconds between two measurements."""
REST_FACTOR = 19.0
"""Pause after a measurement as a multiple of its duration: at most a twentieth of the time."""
CLOSE_SECONDS, CLOSE_FACTOR = 3.0, 4.0
"""Pauses while the page looks every second: measuring takes at most a fifth of the time."""
STEPS = 4
"""Measured steps of each lane: the first overlaps with unmeasured steps before it, the last with
those after it."""


Collect = Callable[[float], list[list[Span]]]
"""Collects what the followers measured, given a timeout in seconds; raises EngineFailedError."""

Passes = Callable[[float], tuple[FFNWorkerView, list[Span]]]
"""Returns an ffn worker of another runtime and its latest passes; otherwise as `Collect`."""


class Watch:
    """Measures a few steps now and then while a client watches.

    Args:
      probe: this process's probe.
      lanes: number of lanes of all domains.
      collect: collects what the followers measured; None: there are no followers.
      clock: seconds, monotonic.
      passes: asks an ffn worker of another runtime; None: there is none.
    """

    def __init__(
        self,
        probe: Probe,
        lanes: int,
        collect: Collect | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        passes: Passes | None = None,
    ):
        self._probe, self._collect, self._clock = probe, collect, clock
        self._boundaries = STEPS * lanes
        self._passes = passes
        self._left = 0  # boundaries until the probes are turned off; 0: they are off
        self._begun = 0.0
        self._ended = self._took = float("-inf")
        self._looked = float("-inf")
        self._processing = False
        self._view = PipelineView()
        self._totals: dict[AnyStage, Transfers] = {}
        self._work: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def look(self) -> PipelineView:
        """Returns the latest view at once, and keeps measuring going for a while; any thread."""
        with self._lock:
            self._looked = self._clock()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="jaxserve-watch", daemon=True
                )
                self._thread.start()
        return self._view

    def next(self) -> bool:
        """Called at every step boundary; returns whether the next steps are measured."""
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
        """Called by the step loop when it is idle, which completes the current measurement."""
        if self._left:
            self._left = 0
            self._end()

    def close(self) -> None:
        """Ends the threads, after the step loop has ended."""
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
        """Turns the measurements of all processes into the next view."""
        own, missing = self._probe.take(TAKE_SECONDS), ""
        measured, workers = [own], []
        try:
            if self._collect is not None:
                measured += self._collect(TAKE_SECONDS)
            if self._passes is not None:
                worker, passes = self._passes(TAKE_SECONDS)
                measured.append(answered(passes, own))
                workers.append(worker)
        except EngineFailedError as error:
            missing = str(error)
        spans = merge(measured)
        steps = {(span.lane, span.step) for span in spans if span.lane >= 0}
        if len(steps) < STEPS:  # too few steps for a typical window
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
            ffn=workers,
            missing=missing,
        )


def _fractions(summary: Summary) -> tuple[dict[AnyStage, float], float | None]:
    """Busy fractions of the measured stages, and the bubble if both roles were measured."""
    busy = {stage: times.busy for stage, times in summary.stages.items() if times.count}
    if "step" in busy:
        return busy, 1.0 - busy["step"]
    return busy, summary.bubble if {"attend", "ffn"} <= set(busy) else None
