"""A serving deployment in simulated time: the scheduler plans, lanes run. Every slot always decodes
a request, whose prompt comes computed from elsewhere. Requests at a rate are a fleet's
(`fleet/simulation.py`).

The schedulers, one for each domain, and the loop are the engine's own (`engine/loop.py`); this
module carries out the loop's actions in simulated time. `lanes.py` works out when devices are busy,
from the times of `stage_times.py`. `fleet/simulation.py` runs several engines.
"""

import functools
import gc
import heapq
import itertools
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import msgspec
import numpy as np

from jaxserve.config.deployment import Deployment
from jaxserve.engine.admission import choose_domain
from jaxserve.engine.loop import Await, Enqueue, Loop
from jaxserve.engine.outputs import StepOutputs, StepResult
from jaxserve.engine.request import Request, SamplingParams, TokenOutput
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.sizes import SchedulerSizes
from jaxserve.errors import ConfigError
from jaxserve.observe.spans import Span
from jaxserve.planner.demand import Lengths
from jaxserve.planner.lanes import (
    Busy,
    Colocated,
    Disturb,
    Note,
    pipeline_of,
    undisturbed,
)
from jaxserve.planner.noise import Jitter
from jaxserve.planner.results import Result, Times
from jaxserve.planner.stage_times import Rows, StageTimes, StepTimes
from jaxserve.roles.step_plan import StepPlan

NEVER = float("inf")


class Constant:
    """Stage times of steps that take equally long, whatever the batch."""

    overlapped = False

    def __init__(self, layers: int, groups: int, seconds: float = 0.0):
        self.layers, zeros = layers, [0.0] * layers
        attend = [np.full(groups, seconds / layers)] * layers
        self._step = StepTimes(attend, zeros, zeros, zeros, 0.0)

    def step(self, rows: Rows) -> StepTimes:
        return self._step


class SimulatedEngine:
    """An engine without a device: it has a clock of its own, and takes a turn when it is told to.
    Times of calls never decrease: `submit` is no earlier than the last `turn` of any engine.

    Args:
      elsewhere: whether prompts come with their KV entries, as from a prefill worker: a prompt is
        one step's work, whatever its length.
      prefixes: whether prompts begin alike, so that a prefix cache finds something.
      domains: attention meshes on one ffn mesh.
      host_seconds: of the host at every step's end.
    """

    def __init__(
        self,
        deployment: Deployment,
        times: StageTimes,
        *,
        elsewhere: bool = False,
        prefixes: bool = False,
        domains: int = 1,
        host_seconds: float = 0.0,
        disturb: Disturb = undisturbed,
        note: Note | None = None,
    ):
        self.deployment = deployment
        self._times, self._elsewhere, self._host = times, elsewhere, host_seconds
        groups, lanes = deployment.attention.dp, deployment.lanes
        self._pipeline = pipeline_of(
            deployment.topology,
            times,
            layers=times.layers,
            lanes=lanes,
            groups=groups,
            domains=domains,
            disturb=disturb,
            note=note,
        )
        self.schedulers = [self._scheduler(prefixes) for _ in range(domains)]
        self.now = 0.0
        self._loop = Loop(self.schedulers, lanes * domains, lambda: self.now)
        self._sampled = StepResult(np.zeros((groups, deployment.scheduler.slots), np.int32), {}, {})
        self._ends: deque[float] = deque()
        self._arrivals: list[tuple[float, int, Request]] = []
        self._numbers = itertools.count()
        self._idle = True
        self._steps = 0

    def _scheduler(self, prefixes: bool) -> Scheduler:
        limits, cache = self.deployment.scheduler, self.deployment.cache
        budget, buckets, prefill = limits.token_budget, limits.token_buckets, limits.prefill_tokens
        if self._elsewhere:
            budget, buckets, prefill = limits.slots * limits.max_length, [], 0
        sizes = SchedulerSizes(
            groups=self.deployment.attention.dp,
            lanes=self.deployment.lanes,
            slots=limits.slots,
            pages=cache.pages,
            page_size=cache.page_size,
            max_length=limits.max_length,
            token_budget=budget,
            token_buckets=sorted({*buckets, budget}),
            page_buckets=limits.page_buckets,
            max_waiting=2**20,
            prefill_tokens=prefill,
            prefix_cache=prefixes and cache.prefix,
        )
        return Scheduler(sizes)

    def _rows(self, plan: StepPlan) -> Rows:
        """The sequences of a step, for its times."""
        limits, tokens, padded = self.deployment.scheduler, plan.token_counts, plan.bucket.tokens
        groups, group = self.deployment.attention.dp, plan.rows // limits.slots
        if self._elsewhere:
            tokens, most = np.ones_like(tokens), np.bincount(group).max()
            padded = next((size for size in limits.token_buckets if size >= most), int(most))
        sampled, reach = min(padded, limits.slots), self.deployment.cache.page_size
        reach *= plan.bucket.pages
        return Rows(groups, group, tokens, plan.kv_lengths, padded, reach, sampled)

    @property
    def busy(self) -> Busy:
        return self._pipeline.busy

    @property
    def next_at(self) -> float:
        """When the engine does something next."""
        if not self._idle:
            return self.now
        return max(self.now, self._arrivals[0][0]) if self._arrivals else NEVER

    def submit(self, request: Request, at: float) -> None:
        """Takes a request that arrives at a time."""
        heapq.heappush(self._arrivals, (at, next(self._numbers), request))

    def warm(self, prompt: list[int]) -> None:
        """Puts a prompt into the prefix cache of every DP group before time begins."""
        times, host, groups = self._times, self._host, self.deployment.attention.dp
        self._times, self._host = Constant(times.layers, groups), 0.0
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        for group in range(groups):
            self.submit(Request(request_id=f"warm {group}", prompt=prompt, params=params), 0.0)
        while self.next_at < NEVER:
            self.turn()
        self._times, self._host = times, host
        for scheduler in self.schedulers:
            scheduler.queue.prompt_tokens = scheduler.queue.prompt_tokens_found = 0

    def turn(self) -> list[tuple[float, StepOutputs]]:
        """Carries out one action of the loop, at `next_at`; returns outputs, each with the time at
        which the engine had them."""
        self.now, self._idle = self.next_at, False
        news = []
        while self._ends and self._ends[0] <= self.now:
            news.append(self._read())
        self._arrive()
        match self._loop.next(self._lanes_to_plan()):
            case Enqueue(steps):
                for lane, plan in steps:
                    self._begin(lane, plan)
                self.now += self._host
                lane, end = self._pipeline.advance(self.now)
                self._loop.enqueued(lane)
                self._ends.append(end)
            case Await():
                news.append(self._read())
            case _:
                self._idle = True
        return news

    def _arrive(self) -> None:
        """Submits the requests that have come."""
        while self._arrivals and self._arrivals[0][0] <= self.now:
            _, _, request = heapq.heappop(self._arrivals)
            self._loop.submit(request, choose_domain(self.schedulers, request))

    def _lanes_to_plan(self) -> Iterable[int]:
        return self._pipeline.idle_lanes

    def _begin(self, lane: int, plan: StepPlan) -> Rows:
        rows = self._rows(plan)
        self._pipeline.begin(lane, self._steps, self.now, self._times.step(rows))
        self._steps += 1
        return rows

    def _read(self) -> tuple[float, StepOutputs]:
        """Waits for the oldest step in flight and takes its result."""
        lane, plan = self._loop.in_flight[0]
        self.now = max(self.now, self._ends.popleft())
        return self.now, self._loop.complete(lane, plan, self._sampled)


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """How the deployment runs."""

    domains: int = 1
    steps: int = 100
    """Steps of the lane that first completes them; two more follow, so that no lane runs alone."""
    warm_up: int = 10
    """First steps of every lane, which are not counted."""
    jitter: Jitter = Jitter()
    host_seconds: float = 0.0
    """Host time at every step's end: planning and enqueueing."""
    tokens_a_step: float = 1.0
    """Tokens that a sequence gains per step: 1 + the share of accepted drafts."""
    seed: int = 0
    keep_steps: int = 3
    """Number of last steps of every lane that are kept for a timeline."""


class _Request(msgspec.Struct):
    """A request in the simulation."""

    first: float = -1.0
    """Time of its first counted token."""
    last: float = -1.0
    tokens: int = 0


class Simulation(SimulatedEngine):
    """A single simulation, in which a new request follows each that ends; call `run` once."""

    def __init__(
        self,
        deployment: Deployment,
        times: StageTimes,
        lengths: Lengths,
        conditions: Conditions,
    ):
        self._drawn, self._conditions = lengths, conditions
        self._random = np.random.default_rng(conditions.seed)
        self._domains, self._lanes = conditions.domains, deployment.lanes * conditions.domains
        self._slots = deployment.attention.dp * deployment.scheduler.slots
        if deployment.topology.has("colocated") and self._domains > 1:
            raise ConfigError(f"{self._domains} domains in a colocated deployment")
        kept = (4 * times.layers + 1) * self._lanes * (conditions.keep_steps + 1)
        self._spans: deque[Span] = deque(maxlen=kept)
        super().__init__(
            deployment,
            times,
            elsewhere=True,
            domains=self._domains,
            host_seconds=conditions.host_seconds,
            disturb=disturbance(conditions.jitter, self._random),
            note=self._spans.append,
        )
        self._prompts: dict[int, list[int]] = {}
        """Length → prompt: a list for each of many sequences would take most of the memory."""
        self._requests: dict[str, _Request] = {}
        self._done: list[_Request] = []
        self._count = self._read_steps = self._counted = 0
        self._running = self._length = 0.0
        self._last = conditions.steps + 2
        """Steps of the lane that has the most of them."""
        self._uncounted = 2**62
        """Number of steps after which none counts."""
        self._ended: list[list[tuple[float, int]]] = [[] for _ in range(self._lanes)]
        """End and tokens of every counted step, by lane."""
        self._start: tuple[float, Busy] | None = None
        self._end: tuple[float, Busy] | None = None

    def run(self) -> tuple[Result, list[Span]]:
        """Simulates to the end; returns the result and the spans of the last steps."""
        tell = Progress()
        with no_garbage_collection():
            self._fill()
            self._idle = False
            while not self._idle:
                self.turn()
                tell(lambda: f"{max(self._loop.issued)} of {self._last} steps simulated")
        return self._result(), self._kept_spans()

    def _fill(self) -> None:
        """Adds a request for every slot, at different points within their outputs."""
        for _ in range(self._lanes * self._slots):
            prompt, output = self._drawn.draw(self._random)
            age = int(self._random.integers(output))
            self._add(prompt + age, output - age)

    def _add(self, prompt: int, output: int) -> None:
        """A request, to the domain whose turn it is."""
        name = str(self._count)
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        tokens = self._prompts.setdefault(prompt, [])
        if not tokens:
            tokens += [0] * prompt
        request = Request(request_id=name, prompt=tokens, params=params)
        self._loop.submit(request, self._count % self._domains)
        self._requests[name] = _Request()
        self._count += 1

    @property
    def _all_issued(self) -> bool:
        """Whether a lane has had all its steps, so that no lane begins another one."""
        return max(self._loop.issued) >= self._last

    def _lanes_to_plan(self) -> Iterator[int]:
        """Idle lanes, as long as the lanes before them leave steps to issue."""
        return (lane for lane in self._pipeline.idle_lanes if not self._all_issued)

    def _begin(self, lane: int, plan: StepPlan) -> Rows:
        if self._loop.issued[lane] == self._last - 1:
            self._uncounted = min(self._uncounted, self._steps)
        rows = super()._begin(lane, plan)
        if self._start is not None:
            self._running += len(rows.tokens)
            self._length += float(rows.length.sum())
            self._counted += 1
        return rows

    def _read(self) -> tuple[float, StepOutputs]:
        (lane, _), end = self._loop.in_flight[0], self._ends[0]
        news = super()._read()
        self._read_steps += 1
        if self._read_steps > self._uncounted:
            self._end = self._end or (self.now, self.busy)
            return news
        if self._start is not None:
            self._ended[lane].append((end, len(news[1])))
        for output in news[1]:
            self._deliver(output, end)
        if self._start is None and min(self._loop.issued) >= self._conditions.warm_up:
            self._start = self.now, self.busy
            for request in self._requests.values():
                request.first = -1.0
        return news

    def _deliver(self, output: TokenOutput, end: float) -> None:
        request = self._requests[output.request_id]
        if request.first < 0:
            request.first, request.tokens = end, 0
        request.last = end
        request.tokens += 1
        if output.finish_reason is not None:
            del self._requests[output.request_id]
            if self._start is not None:
                self._done.append(request)
            self._add(*self._drawn.draw(self._random))

    def _result(self) -> Result:
        start, before = self._start or (0.0, Busy(0, 0, 0, 0))
        end, after = self._end or (self.now, self.busy)
        seconds = max(end - start, 1e-12)
        shares = {
            f"{name}_busy": (getattr(after, name) - getattr(before, name)) / seconds
            for name in Busy._fields
        }
        seen = [*self._done, *self._requests.values()]
        factor = self._conditions.tokens_a_step
        several = (r for r in seen if r.tokens > 1 and r.first >= 0)
        tpot = [(r.last - r.first) / (r.tokens - 1) / factor for r in several]
        a = self.deployment
        devices = self._domains * a.attention.devices
        devices += 0 if a.topology.has("colocated") else a.ffn.devices
        # A lane's clock runs from the end of its first counted step.
        tokens = [sum(tokens for _, tokens in steps[1:]) for steps in self._ended]
        rate = factor * sum(
            count / (steps[-1][0] - steps[0][0])
            for count, steps in zip(tokens, self._ended, strict=True)
            if count
        )
        counted = max(1, self._counted)
        colocated = self._pipeline if isinstance(self._pipeline, Colocated) else None
        return Result(
            seconds=seconds,
            steps=self._counted,
            tokens=factor * sum(tokens),
            tokens_per_second=rate,
            tokens_per_device=rate / devices,
            sequences=self._running / counted * self._lanes,
            context=self._length / max(1.0, self._running),
            finished=len(self._done),
            preemptions=sum(scheduler.num_preemptions for scheduler in self.schedulers),
            tpot=Times.of(tpot),
            **shares,
            seen={s: colocated.seen(s) for s in ("dispatch", "combine")} if colocated else {},
        )

    def _kept_spans(self) -> list[Span]:
        """The last whole steps of every lane."""
        steps: dict[int, set[int]] = {}
        for span in self._spans:
            steps.setdefault(span.lane, set()).add(span.step)
        last = {lane: sorted(own)[-self._conditions.keep_steps :] for lane, own in steps.items()}
        return [span for span in self._spans if span.step in last[span.lane]]


class Progress:
    """Reports progress on stderr, from five seconds on and every five seconds."""

    def __init__(self) -> None:
        self._next = time.monotonic() + 5

    def __call__(self, text: Callable[[], str]) -> None:
        if (now := time.monotonic()) >= self._next:
            print(f"{text()} …", file=sys.stderr, flush=True)
            self._next = now + 5


def disturbance(jitter: Jitter, random: np.random.Generator) -> Disturb:
    """Returns a function that adds a jitter's noise to stages."""
    return undisturbed if jitter.silent else functools.partial(jitter.draw, random)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collects no garbage meanwhile: millions of objects refer to each other, and none is free."""
    enable = gc.enable if gc.isenabled() else gc.disable
    gc.disable()
    try:
        yield
    finally:
        enable()
        enable()
