"""Measured spans of the stages: when each ran, and how busy both sides were.

The driver calls `Recorder.observe` right after it enqueued a stage; worker threads note when the
stage's result is ready. `merge` joins the spans of several processes, `summarise` turns spans into
fractions, `timeline_view.py` draws them. Nothing here knows the schedule, the transport or JAX:
a result is anything with `block_until_ready`.

Only completions are measured. A span starts when everything it had to wait for was there: its
input (attend → dispatch → ffn → combine → the next layer's attend of the same lane), the submesh or
link direction (the previous span of the same stage) and the host (the stage was enqueued). In
colocated mode the one stage is the whole `step`.
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

Stage = Literal["attend", "dispatch", "ffn", "combine"]
STAGES: tuple[Stage, ...] = get_args(Stage)
AnyStage = Stage | Literal["step"]
"""Those of AFD, and the one of colocated mode: all of them in one program."""
_INPUT: dict[AnyStage, AnyStage] = {
    "attend": "combine",
    "dispatch": "attend",
    "ffn": "dispatch",
    "combine": "ffn",
}

# The interpreter hands a thread its turn after at most this long while recording; the default of
# 5 ms would be the error of every time stamp while the driver is busy.
_SWITCH_INTERVAL_S = 5e-5


@runtime_checkable
class Result(Protocol):
    """What a stage produces, as far as the recorder is concerned (a `jax.Array`)."""

    def block_until_ready(self) -> object:
        """Returns once the value is there; raises if it never will be."""


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
    """Index of the process that saw it end."""
    enqueued_ns: int
    """When the driver had enqueued it: it cannot have started earlier."""

    @property
    def milliseconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


class StageTimes(msgspec.Struct, frozen=True):
    """Durations of one stage's spans."""

    count: int
    median_ms: float
    p90_ms: float
    busy: float
    """Share of the window in which such a span was running."""


class Summary(msgspec.Struct, frozen=True):
    """How a window of the timeline was used."""

    start_ns: int
    end_ns: int
    lanes: int
    steps: int
    """Steps that ended an attend in the window, over all lanes."""
    attention_busy: float
    """Share of the window in which the attention mesh ran an attend."""
    ffn_busy: float
    """Share of the window in which the ffn mesh ran an ffn."""
    bubble: float
    """1 − the busier side's share: 0 when one side never waits, which no schedule can beat."""
    stages: dict[AnyStage, StageTimes]
    """Of every stage of AFD; of `step` where there are such spans."""

    @property
    def milliseconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


class Recorder:
    """Measures when observed stages end; thread-safe, bounded.

    One worker thread a stage and lane: the stages of one lane end in the order in which they were
    enqueued, those of different lanes need not.

    Args:
      process: index of this process, noted in its spans.
      capacity: spans that are kept, the newest.
      backlog: unfinished stages that are followed at a time; more are counted in `dropped`.
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
        """Stages that were not measured: their result failed, was donated, or came too fast."""
        self._workers: dict[tuple[AnyStage, int], tuple[queue.SimpleQueue, threading.Thread]] = {}
        self._switch_interval: float | None = None
        if not paused:
            self.resume()

    def resume(self) -> None:
        """Has threads take turns often, which exact times need."""
        if self._switch_interval is None:
            self._switch_interval = sys.getswitchinterval()
            sys.setswitchinterval(min(self._switch_interval, _SWITCH_INTERVAL_S))

    def pause(self) -> None:
        """Costs nothing until `resume`, if nothing is observed meanwhile."""
        if self._switch_interval is not None:
            sys.setswitchinterval(self._switch_interval)
            self._switch_interval = None

    def observe(self, stage: AnyStage, lane: int, layer: int, step: int, result: Result) -> None:
        """Follows a stage that was just enqueued; returns at once.

        Args:
          result: the array that the stage produces; it must never be donated, since the recorder
            holds it until it is ready.
        """
        enqueued = self._clock()
        with self._changed:
            if self._closed or self._pending >= self._backlog:
                self.dropped += 1
                return
            self._pending += 1
            if (stage, lane) not in self._workers:
                self._workers[stage, lane] = self._start(stage, lane)
            stages, _ = self._workers[stage, lane]
        stages.put((layer, step, enqueued, result))

    def flush(self, timeout: float) -> bool:
        """Waits up to `timeout` seconds until everything observed has ended; says if it has."""
        with self._changed:
            return self._changed.wait_for(lambda: self._pending == 0, timeout)

    def spans(self) -> list[Span]:
        """The newest spans that have ended, by start."""
        with self._changed:
            ended = list(self._ring)
        return merge([ended])

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
            layer, step, enqueued, result = item
            try:
                result.block_until_ready()
            except Exception:  # the driver reports it; here it is only a span that cannot be had
                span = None
            else:
                end = self._clock()
                span = Span(stage, lane, layer, step, enqueued, end, self._process, enqueued)
            del item, result  # not kept alive while waiting for the next
            with self._changed:
                if span is None:
                    self.dropped += 1
                else:
                    self._ring.append(span)
                self._pending -= 1
                self._changed.notify_all()


def merge(span_lists: Iterable[Iterable[Span]]) -> list[Span]:
    """Joins the spans of several processes and works out every start again; sorted by start.

    A process sees the ends of its own stages only, so it cannot know by itself when the other
    side's output was there. The clocks of the processes are taken to agree; a span whose input
    seems to end after it has length 0.
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
    """A typical stretch of `steps` consecutive steps, (start_ns, end_ns).

    It reaches from the start of a step of the lowest lane to the start of a later one. Of all such
    stretches, except those with the lane's first or last step, the one of median length is taken:
    neither a compilation nor a pause between requests. Too few steps: everything there is.
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
    """How many steps of each lane make a readable picture: at least 1, at most 3.

    Fewer the more attends a step of all lanes has, `limit` being the attends of one picture.
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
