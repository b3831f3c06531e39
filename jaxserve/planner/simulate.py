"""A serving deployment in simulated time: requests come, the scheduler plans, lanes run.

Called by `plan.py simulate`. The schedulers, one a domain, and the loop are the engine's own
(`engine/loop.py`); this module carries its actions out in simulated time. What devices do meanwhile
is worked out by `lanes.py` from the times of `stage_times.py`.
"""

import gc
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from jaxserve.config.deployment import Deployment
from jaxserve.engine.loop import Await, Enqueue, Loop, ScheduledStep
from jaxserve.engine.outputs import StepResult
from jaxserve.engine.request import Request, SamplingParams, TokenOutput
from jaxserve.errors import ConfigError
from jaxserve.observe.spans import AFDStage, Span
from jaxserve.planner.colocated_lanes import Colocated, Seen
from jaxserve.planner.lanes import Busy, LinkMode
from jaxserve.planner.noise import Jitter, Lengths
from jaxserve.planner.pipeline import pipeline_of
from jaxserve.planner.simulated_engine import make_scheduler, rows_of
from jaxserve.planner.stage_times import StageTimes


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of the deployment."""

    lengths: Lengths
    rate: float = 0.0
    """Requests a second, at random (Poisson). 0: as many as there are slots are always there, a
    new one for each that ends."""
    prefill: Literal["here", "elsewhere"] = "elsewhere"
    """`elsewhere`: a prompt's cache comes ready from a prefill deployment (Step-3, xDeepServe)."""
    staggered: bool = True
    """Without a rate: the first ones are in the middle of their outputs, each elsewhere."""


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """How the deployment runs."""

    domains: int = 1
    steps: int = 100
    """Of the first lane to have so many; two more follow uncounted, so that none runs alone."""
    warm_up: int = 10
    """Steps of every lane that are not counted."""
    link: LinkMode = "duplex"
    jitter: Jitter = Jitter()
    host_seconds: float = 0.0
    """Of the host at every step's end: planning and enqueueing."""
    tokens_a_step: float = 1.0
    """Tokens that a sequence gets of a step: 1 + the share of drafts that are accepted."""
    seed: int = 0
    keep_steps: int = 3
    """Steps of every lane that are kept for a timeline, the last ones."""


class Percentiles(NamedTuple):
    """Seconds."""

    mean: float
    p50: float
    p90: float
    p99: float


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a simulation, without its warm-up."""

    seconds: float
    """Simulated."""
    steps: int
    """Of all lanes."""
    tokens: float
    tokens_per_second: float
    tokens_per_device: float
    """A second and device."""
    sequences: float
    """Running at a time, on the mean."""
    context: float
    """Tokens of a running sequence, on the mean."""
    finished: int
    """Requests."""
    preemptions: int
    tpot: Percentiles | None
    """Between the tokens of a request, over the requests with two and more."""
    ttft: Percentiles | None
    """From a request's arrival to its first token; without a rate, from its predecessor's end."""
    attention_busy: float
    """Share of the time, of the mean attention device."""
    ffn_busy: float
    dispatch_busy: float
    combine_busy: float
    seen: dict[AFDStage, Seen] = {}
    """Colocated: the collectives with their waiting."""

    @property
    def bubble(self) -> float:
        """1 − the busier role's share."""
        return 1 - max(self.attention_busy, self.ffn_busy)


class _Request(msgspec.Struct):
    """One on its way."""

    arrival: float
    first: float = -1.0
    """When its first counted token came."""
    last: float = -1.0
    tokens: int = 0
    whole: bool = False
    """Whether the first counted token was its first."""


class _LaneProgress(NamedTuple):
    """Of a lane's counted steps: when the first and the last ended, tokens after the first."""

    first: float
    last: float
    tokens: int


class Simulation:
    """One run; `run` once."""

    def __init__(
        self,
        deployment: Deployment,
        times: StageTimes,
        traffic: Traffic,
        conditions: Conditions,
    ):
        self._deployment, self._times = deployment, times
        self._traffic, self._conditions = traffic, conditions
        self._random = np.random.default_rng(conditions.seed)
        self._domains = conditions.domains
        self._groups = deployment.attention.dp
        self._slots = deployment.scheduler.slots
        lanes = deployment.lanes
        self._lanes = lanes * self._domains
        if deployment.topology.has("colocated") and self._domains > 1:
            raise ConfigError(f"{self._domains} domains in a colocated deployment")
        self._spans: deque[Span] = deque(
            maxlen=(4 * times.layers + 1) * self._lanes * (conditions.keep_steps + 1)
        )
        disturb = self._disturb
        self._pipeline = pipeline_of(
            deployment.topology,
            times,
            lanes=lanes,
            groups=self._groups,
            domains=self._domains,
            link=conditions.link,
            disturb=disturb,
            note=self._spans.append,
        )
        self._elsewhere = traffic.prefill == "elsewhere"
        self._schedulers = [
            make_scheduler(deployment, elsewhere=self._elsewhere) for _ in range(self._domains)
        ]
        self._loop = Loop(self._schedulers, self._lanes, lambda: self._now)
        self._sampled = StepResult(np.zeros((self._groups, self._slots), np.int32), {}, {})
        self._prompt = [0] * deployment.scheduler.max_length
        self._requests: dict[str, _Request] = {}
        self._done: list[_Request] = []
        self._count = 0
        self._now = 0.0
        self._next_arrival = 0.0
        self._indices: list[deque[int]] = [deque() for _ in range(self._lanes)]
        """By lane, the global step indices of its steps that are not complete, oldest first."""
        self._ends: deque[float] = deque()
        """When the steps end that the loop has in flight."""
        self._steps = conditions.steps + 2
        """Of the lane that has the most of them."""
        self._issued = 0
        self._uncounted = 2**62
        """Global index of the first step that no longer counts."""
        self._counted = 0
        self._progress: dict[int, _LaneProgress] = {}
        self._running = 0.0
        self._length = 0.0
        self._start: tuple[float, Busy] | None = None
        self._end: tuple[float, Busy] | None = None

    def run(self) -> tuple[Result, list[Span]]:
        """Simulates to the end."""
        with no_garbage_collection():
            if not self._traffic.rate:
                self._fill()
            while self._turn():
                pass
        return self._result(), self._kept_spans()

    def _fill(self) -> None:
        """A request for every slot, for a start in the middle of things."""
        for _ in range(self._domains * self._deployment.lanes * self._groups * self._slots):
            prompt, output = self._traffic.lengths.draw(self._random)
            if self._traffic.staggered:
                age = int(self._random.integers(output))
                prompt, output = prompt + age, output - age
            self._add(prompt, output, 0.0)

    def _add(self, prompt: int, output: int, arrival: float) -> None:
        """A request, to the domain whose turn it is."""
        name = str(self._count)
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        request = Request(request_id=name, prompt=self._prompt[:prompt], params=params)
        self._loop.submit(request, self._count % self._domains)
        self._requests[name] = _Request(arrival)
        self._count += 1

    def _arrive(self) -> None:
        while self._traffic.rate and self._next_arrival <= self._now:
            self._add(*self._traffic.lengths.draw(self._random), self._next_arrival)
            self._next_arrival += float(self._random.exponential(1 / self._traffic.rate))

    def _turn(self) -> bool:
        """Carries out one action of the loop; False: everything is done."""
        while self._ends and self._ends[0] <= self._now:
            self._read()
        self._arrive()
        match self._loop.next(self._lanes_to_plan()):
            case Enqueue(steps):
                for step in steps:
                    self._begin(step)
                self._now += self._conditions.host_seconds
                lane, end = self._pipeline.advance(self._now)
                self._loop.enqueued(lane)
                self._ends.append(end)
            case Await():
                self._read()
            case _:
                if not self._traffic.rate or self._all_issued:
                    return False
                self._now = max(self._now, self._next_arrival)
        return True

    @property
    def _all_issued(self) -> bool:
        """Whether a lane has had all its steps, so that no lane begins another one."""
        return max(self._loop.issued) >= self._steps

    def _lanes_to_plan(self) -> Iterator[int]:
        """Idle lanes, as long as the lanes before them leave steps to issue."""
        return (lane for lane in self._pipeline.idle_lanes if not self._all_issued)

    def _begin(self, step: ScheduledStep) -> None:
        lane = step.lane
        rows = rows_of(self._deployment, step.plan, elsewhere=self._elsewhere)
        self._indices[lane].append(self._issued)
        if self._loop.issued[lane] == self._steps - 1:
            self._uncounted = min(self._uncounted, self._issued)
        self._pipeline.begin(lane, self._issued, self._now, self._times.step(rows))
        self._issued += 1
        if self._start is not None:
            self._running += len(rows.tokens)
            self._length += float(rows.length.sum())
            self._counted += 1

    def _disturb(self, stage: AFDStage, seconds: np.ndarray) -> np.ndarray:
        return self._conditions.jitter.draw(self._random, stage, seconds)

    def _read(self) -> None:
        """Waits for the oldest step in flight and takes its result."""
        lane, plan = self._loop.in_flight[0]
        end, number = self._ends.popleft(), self._indices[lane].popleft()
        self._now = max(self._now, end)
        outputs = self._loop.complete(lane, plan, self._sampled)
        if number >= self._uncounted:
            self._end = self._end or (self._now, self._pipeline.busy)
            return
        if self._start is not None:
            # A lane's clock runs from the end of its first counted step.
            before = self._progress.setdefault(lane, _LaneProgress(end, end, 0))
            if before.first < end:
                tokens = before.tokens + len(outputs)
                self._progress[lane] = before._replace(last=end, tokens=tokens)
        for output in outputs:
            self._deliver(output, end)
        if self._start is None and min(self._loop.issued) >= self._conditions.warm_up:
            self._start = self._now, self._pipeline.busy
            for request in self._requests.values():
                request.first = -1.0

    def _deliver(self, output: TokenOutput, end: float) -> None:
        request = self._requests[output.request_id]
        if request.first < 0:
            request.whole = request.tokens == 0
            request.first, request.tokens = end, 0
        request.last = end
        request.tokens += 1
        if output.finish_reason is not None:
            del self._requests[output.request_id]
            if self._start is not None:
                self._done.append(request)
            if not self._traffic.rate:
                self._add(*self._traffic.lengths.draw(self._random), end)

    def _result(self) -> Result:
        start, before = self._start or (0.0, Busy(0, 0, 0, 0))
        end, after = self._end or (self._now, self._pipeline.busy)
        seconds = max(end - start, 1e-12)
        shares = [(b - a) / seconds for a, b in zip(before, after, strict=True)]
        seen = [*self._done, *self._requests.values()]
        factor = self._conditions.tokens_a_step
        tpot = [
            (r.last - r.first) / (r.tokens - 1) / factor
            for r in seen
            if r.tokens > 1 and r.first >= 0
        ]
        ttft = [r.first - r.arrival for r in seen if r.whole]
        a = self._deployment
        devices = self._domains * a.attention.devices
        devices += 0 if a.topology.has("colocated") else a.ffn.devices
        lanes = [lane for lane in self._progress.values() if lane.tokens]
        rate = factor * sum(lane.tokens / (lane.last - lane.first) for lane in lanes)
        counted = max(1, self._counted)
        colocated = self._pipeline if isinstance(self._pipeline, Colocated) else None
        return Result(
            seconds=seconds,
            steps=self._counted,
            tokens=factor * sum(lane.tokens for lane in lanes),
            tokens_per_second=rate,
            tokens_per_device=rate / devices,
            sequences=self._running / counted * self._lanes,
            context=self._length / max(1.0, self._running),
            finished=len(self._done),
            preemptions=sum(scheduler.num_preemptions for scheduler in self._schedulers),
            tpot=percentiles(tpot),
            ttft=percentiles(ttft),
            attention_busy=shares[0],
            ffn_busy=shares[1],
            dispatch_busy=shares[2],
            combine_busy=shares[3],
            seen={s: colocated.seen(s) for s in ("dispatch", "combine")} if colocated else {},
        )

    def _kept_spans(self) -> list[Span]:
        """The last whole steps of every lane."""
        numbers: dict[int, set[int]] = {}
        for span in self._spans:
            numbers.setdefault(span.lane, set()).add(span.step)
        keep = {
            (lane, step)
            for lane, steps in numbers.items()
            for step in sorted(steps)[-self._conditions.keep_steps :]
        }
        return [span for span in self._spans if (span.lane, span.step) in keep]


def percentiles(values: Sequence[float]) -> Percentiles | None:
    """Of these seconds; None: there are none."""
    if not values:
        return None
    return Percentiles(float(np.mean(values)), *map(float, np.percentile(values, [50, 90, 99])))


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Millions of objects that hang together are looked through for nothing."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
