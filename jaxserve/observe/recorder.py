"""Measures when stages end.

A cell calls `Recorder.observe` right after it has enqueued a stage; a worker thread of the recorder
notes when the stage's result is ready. Knows neither schedule, transport nor JAX: a result is
anything with `block_until_ready`.
"""

import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from jaxserve.observe.merging import merge
from jaxserve.observe.spans import AnyStage, PassFill, Span
from jaxserve.roles.layout import StepLoad

# The interpreter's thread switch interval while recording, in seconds; the default of 5 ms would be
# the error of every time stamp while the step loop is busy.
_SWITCH_INTERVAL_S = 5e-5


@runtime_checkable
class StageResult(Protocol):
    """The part of a stage's result (a `jax.Array`) that the recorder uses."""

    def block_until_ready(self) -> object:
        """Returns once the value is computed; raises if the computation failed."""


class _ShortSwitchInterval:
    """Shortens the thread switch interval of the process while any recorder is active."""

    def __init__(self) -> None:
        self._lock, self._usual = threading.Lock(), 0.0
        self._active: set[Recorder] = set()

    def turn(self, recorder: "Recorder", active: bool) -> None:
        with self._lock:
            if not self._active:
                self._usual = sys.getswitchinterval()
            (self._active.add if active else self._active.discard)(recorder)
            short = min(self._usual, _SWITCH_INTERVAL_S)
            sys.setswitchinterval(short if self._active else self._usual)


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
        self._seen: dict[int, tuple[StageResult, int]] = {}
        if not paused:
            self.resume()

    def resume(self) -> None:
        """Shortens the thread switch interval, which exact times need."""
        _short_interval.turn(self, True)

    def pause(self) -> None:
        """Gives the short interval up until `resume`; the last recorder restores the usual one."""
        _short_interval.turn(self, False)

    def observe(
        self,
        stage: AnyStage,
        lane: int,
        layer: int,
        step: int,
        result: StageResult,
        load: StepLoad | None = None,
        begun: int | None = None,
        fill: PassFill | None = None,
    ) -> None:
        """Tracks a stage that was just enqueued; does not block.

        Args:
          result: the array that the stage produces; it must never be donated, since the recorder
            holds it until it is ready.
          load, fill: the work of its step or pass.
          begun: when its enqueueing began; None: now.
        """
        enqueued = self._clock() if begun is None else begun
        with self._changed:
            if self._closed or self._pending >= self._backlog:
                self.dropped += 1
                return
            self._pending += 1
            if (stage, lane) not in self._workers:
                own: tuple[queue.SimpleQueue, AnyStage, int] = queue.SimpleQueue(), stage, lane
                worker = threading.Thread(None, self._work, f"timeline-{stage}-{lane}", own)
                worker.daemon = True
                worker.start()
                self._workers[stage, lane] = own[0], worker
            stages, _ = self._workers[stage, lane]
        stages.put((layer, step, enqueued, (load, fill), result))

    def seen(self, lane: int, result: StageResult) -> None:
        """Notes that the caller has waited for an observed result and has it now.

        The thread that wakes first notes the end: if all cores are busy, the other one gets a core
        only when the next stage is over.
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

    def _work(self, stages: queue.SimpleQueue, stage: AnyStage, lane: int) -> None:
        while (item := stages.get()) is not None:
            layer, step, enqueued, work, result = item
            try:
                result.block_until_ready()
            except Exception:  # reported elsewhere; here only the span is missing
                span = None
            else:
                end = self._clock()
                other, noted = self._seen.get(lane, (None, end))
                end = min(end, noted) if other is result else end
                span = Span(stage, lane, layer, step, enqueued, end, self._process, enqueued, *work)
            del item, result  # do not keep it alive while waiting for the next
            with self._changed:
                if span is None:
                    self.dropped += 1
                else:
                    self._ring.append(span)
                self._pending -= 1
                self._changed.notify_all()
