"""Measured spans of the stages: when each ran, and how busy both roles were.

`Recorder.observe` is called right after a stage was enqueued; worker threads record when its result
is ready. `merge` joins the spans of several processes, `summarise` turns spans into fractions,
`timeline_view.py` draws them. Nothing here knows the schedule, the transport or JAX: a result is
anything with `block_until_ready`.

Only completions are measured; starts are inferred. A span starts when everything it depends on was
available: its input (attend → dispatch → ffn → combine → the next layer's attend of the same lane),
the mesh or link direction (the previous span of the same stage), and the host (the stage was
enqueued). In colocated mode the only stage is the whole `step`.
"""

import math
import queue
import statistics
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol, get_args, runtime_checkable

import msgspec

from jaxserve.roles.layout import StepLoad

AFDStage = Literal["attend", "dispatch", "ffn", "combine"]
STAGES: tuple[AFDStage, ...] = get_args(AFDStage)
AnyStage = AFDStage | Literal["step"]
"""The stages of AFD, and the only stage of colocated mode, one program for all."""
_INPUT: dict[AnyStage, AnyStage] = {
    "attend": "combine",
    "dispatch": "attend",
    "ffn": "dispatch",
    "combine": "ffn",
}

# The interpreter's thread switch interval while recording, in seconds; the default of 5 ms would be
# the error of every time stamp while the step loop is busy.
_SWITCH_INTERVAL_S = 5e-5


@runtime_checkable
class Result(Protocol):
    """The part of a stage's result (a `jax.Array`) that the recorder uses."""

    def block_until_ready(self) -> object:
        """Returns once the value is computed; raises if the computation failed."""


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
    """Of its step."""

    @property
    def milliseconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


class StageTimes(msgspec.Struct, frozen=True):
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
    stages: dict[AnyStage, StageTimes]
    """Durations of every stage of AFD, or of `step`."""

    @property
    def milliseconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


class _ShortSwitchInterval:
    """The thread switch interval of the process, shortened while any recorder needs it so."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._usual = 0.0

    def enter(self) -> None:
        with self._lock:
            if not self._users:
                self._usual = sys.getswitchinterval()
                sys.setswitchinterval(min(self._usual, _SWITCH_INTERVAL_S))
            self._users += 1

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                sys.setswitchinterval(self._usual)


_short_interval = _ShortSwitchInterval()


class Recorder:
    """Measures when observed stages end; thread-safe, with bounded memory.

    One worker thread per stage and lane: within a lane stages end in the order in which they were
    enqueued, across lanes they need not.

    Args:
      process: index of this process, noted in its spans.
      capacity: number of newest spans that are kept.
      backlog: most unfinished stages that are tracked; further ones are counted in `dropped`.
      clock: nanoseconds since the epoch.
      paused: start as after `pause`.
    """

    def __init__(
        self,
        process: int = 0,
        *,
        capacity: int = 1 << 16,
        backlog: int = 1 << 14,
        clock: Callable[[], int] = time.time_ns,
        paused: bool = False,
    ) -> None:
        self._process = process
        self._clock = clock
        self._backlog = backlog
        self._changed = threading.Condition()
        self._pending = 0
        self._ring: deque[Span] = deque(maxlen=capacity)
        self._closed = False
        self.dropped = 0
        """Number of stages that were not measured: failed, donated, or beyond the backlog."""
        self._workers: dict[tuple[AnyStage, int], tuple[queue.SimpleQueue, threading.Thread]] = {}
        self._seen: dict[int, tuple[Result, int]] = {}
        self._resumed = False
        if not paused:
            self.resume()

    def resume(self) -> None:
        """Shortens the thread switch interval, which exact times need."""
        if not self._resumed:
            self._resumed = True
            _short_interval.enter()

    def pause(self) -> None:
        """Does without the short interval until `resume`; the last recorder restores it."""
        if self._resumed:
            self._resumed = False
            _short_interval.leave()

    def observe(
        self,
        stage: AnyStage,
        lane: int,
        layer: int,
        step: int,
        result: Result,
        load: StepLoad | None = None,
        begun: int | None = None,
    ) -> None:
        """Tracks a stage that was just enqueued; does not block.

        Args:
          result: the array that the stage produces; it must never be donated, since the recorder
            holds it until it is ready.
          load: of its step.
          begun: when its enqueueing began; None: now.
        """
        enqueued = self._clock() if begun is None else begun
        with self._changed:
            if self._closed or self._pending >= self._backlog:
                self.dropped += 1
                return
            self._pending += 1
            if (stage, lane) not in self._workers:
                self._workers[stage, lane] = self._start(stage, lane)
            stages, _ = self._workers[stage, lane]
        stages.put((layer, step, enqueued, load, result))

    def seen(self, lane: int, result: Result) -> None:
        """The caller waited for a result that this recorder observes, and has it now.

        Whichever thread wakes first notes the end: where all cores are busy the other one gets one
        when the next stage is over.
        """
        self._seen[lane] = result, self._clock()

    def flush(self, timeout: float) -> bool:
        """Waits up to `timeout` seconds for everything observed to end; returns whether it did."""
        with self._changed:
            return self._changed.wait_for(lambda: self._pending == 0, timeout)

    def spans(self) -> list[Span]:
        """The newest ended spans, sorted by start."""
        with self._changed:
            ended = list(self._ring)
        return merge([ended])

    def ended(self, timeout: float = 5.0) -> list[Span]:
        """Waits up to `timeout` seconds for everything observed, closes, and returns the spans."""
        self.flush(timeout)
        self.close()
        return self.spans()

    def clear(self) -> None:
        """Forgets the spans that have ended."""
        with self._changed:
            self._ring.clear()

    def close(self, timeout: float = 5.0) -> None:
        """Ends the workers; waits for them for up to `timeout` seconds together."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            workers = list(self._workers.values())
        for stages, _ in workers:
            stages.put(None)
        deadline = time.monotonic() + timeout
        for _, worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        self.pause()

    def _start(self, stage: AnyStage, lane: int) -> tuple[queue.SimpleQueue, threading.Thread]:
        stages: queue.SimpleQueue = queue.SimpleQueue()
        name = f"timeline-{stage}-{lane}"
        worker = threading.Thread(
            target=self._work, args=(stages, stage, lane), name=name, daemon=True
        )
        worker.start()
        return stages, worker

    def _work(self, stages: queue.SimpleQueue, stage: AnyStage, lane: int) -> None:
        while (item := stages.get()) is not None:
            layer, step, enqueued, load, result = item
            try:
                result.block_until_ready()
            except Exception:  # reported elsewhere; here only the span is missing
                span = None
            else:
                end = self._clock()
                other, noted = self._seen.get(lane, (None, end))
                end = min(end, noted) if other is result else end
                span = Span(stage, lane, layer, step, enqueued, end, self._process, enqueued, load)
            del item, result  # do not keep it alive while waiting for the next
            with self._changed:
                if span is None:
                    self.dropped += 1
                else:
                    self._ring.append(span)
                self._pending -= 1
                self._changed.notify_all()


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
    lane = min(span.lane for span in spans)
    starts: dict[int, int] = {}
    for span in spans:
        if span.lane == lane and span.stage in ("attend", "step") and span.layer == 0:
            starts[span.step] = span.start_ns
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
    stages: dict[AnyStage, StageTimes] = {}
    found = {span.stage for span in spans}
    for stage in (*STAGES, *sorted(found.difference(STAGES))):
        times = sorted(span.milliseconds for span in ending if span.stage == stage)
        stages[stage] = StageTimes(
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
