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
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import numpy as np

from jaxserve.config.deployment import Deployment
from jaxserve.engine.admission import choose_domain
from jaxserve.engine.loop import Await, Enqueue, Loop
from jaxserve.engine.outputs import StepOutputs, StepResult
from jaxserve.engine.request import Request, SamplingParams, TokenOutput
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.sequence import SchedulerSizes
from jaxserve.errors import ConfigError
from jaxserve.observe.spans import Span
from jaxserve.planner.demand import Lengths
from jaxserve.planner.lanes import (
    Busy,
    Colocated,
    Disaggregated,
    Disturb,
    Note,
    OneDispatch,
    undisturbed,
)
from jaxserve.planner.noise import Jitter
from jaxserve.planner.results import Result, Times
from jaxserve.planner.stage_times import Rows, StageTimes, StepTimes
from jaxserve.roles.layout import pages_for
from jaxserve.roles.step_plan import StepPlan

NEVER = float("inf")


class Constant:
    """Stage times of steps that take equally long, whatever the batch."""

    def __init__(self, layers: int, groups: int, seconds: float = 0.0):
        self.layers, zeros = layers, np.zeros(layers)
        attend = np.full((layers, groups), seconds / layers)
        self._step = StepTimes(attend, zeros, zeros, zeros, 0.0)

    def step(self, rows: Rows) -> StepTimes:
        return self._step


class SimulatedEngine:
    """An engine without a device: it has a clock of its own, and takes a turn when it is told to.
    Times of calls never decrease: `submit` is no earlier than the last `turn` of any engine.

    Prompts may come with their KV entries, as from a prefill worker (`elsewhere`): a prompt is one
    step's work, whatever its length. They may begin alike, so that a prefix cache finds something
    (`prefixes`). `domains` are attention meshes on one ffn mesh, `host_seconds` those of the host
    at every step's end.
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
        apart = OneDispatch if deployment.whole_steps else Disaggregated
        pipeline = apart if deployment.topology.has("ffn") else Colocated
        self._pipeline: Disaggregated | OneDispatch | Colocated = pipeline(
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
        limits = self.deployment.scheduler
        buckets, prefill = sorted({*limits.token_buckets, limits.token_budget}), 0
        if self._elsewhere:
            buckets = [limits.slots * limits.max_length]
        else:
            prefill = limits.prefill_tokens
        sizes = SchedulerSizes.of(self.deployment, buckets)
        cached = prefixes and self.deployment.cache.prefix
        changed = {"prefix_cache": cached, "prefill_tokens": prefill, "drafts": 0, "modules": 0}
        sizes = msgspec.structs.replace(sizes, **changed, max_waiting=2**20)
        return Scheduler(sizes)

    def _rows(self, plan: StepPlan) -> Rows:
        limits, tokens, padded = self.deployment.scheduler, plan.token_counts, plan.bucket.tokens
        groups, group = self.deployment.attention.dp, plan.rows // limits.slots
        if self._elsewhere:
            tokens, most = np.ones_like(tokens), np.bincount(group).max()
            padded = next((size for size in limits.token_buckets if size >= most), int(most))
        sampled, page = min(padded, limits.slots), self.deployment.cache.page_size
        made = Rows(groups, group, tokens, plan.kv_lengths, padded, plan.bucket.pages * page)
        # A group's tokens may begin in the middle of a page.
        pages = plan.bucket.spread * (pages_for(padded, page) + 1)
        return made._replace(sampled=sampled, exchanged=pages * page)

    @property
    def busy(self) -> Busy:
        return self._pipeline.busy

    @property
    def next_at(self) -> float:
        if not self._idle:
            return self.now
        return max(self.now, self._arrivals[0][0]) if self._arrivals else NEVER

    def submit(self, request: Request, at: float) -> None:
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
        match self._loop.next(self._pipeline.idle_lanes):
            case Enqueue(steps):
                for lane, plan in steps:
                    times = self._times.step(self._rows(plan))
                    self._pipeline.begin(lane, self._steps, self.now, times)
                    self._steps += 1
                    self.now += times.host
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
        while self._arrivals and self._arrivals[0][0] <= self.now:
            _, _, request = heapq.heappop(self._arrivals)
            self._loop.submit(request, choose_domain(self.schedulers, request))

    def _read(self) -> tuple[float, StepOutputs]:
        """Waits for the oldest step in flight and takes its result."""
        lane, plan = self._loop.in_flight[0]
        self.now = max(self.now, self._ends.popleft())
        return self.now, self._loop.complete(lane, plan, self._sampled)


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """How the deployment runs."""

    domains: int = 1
    steps: int = 100
    """Steps of the lane that first completes them."""
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
    length: int
    """Tokens in its cache."""
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
        lanes = deployment.lanes * conditions.domains
        if deployment.topology.has("colocated") and conditions.domains > 1:
            raise ConfigError(f"{conditions.domains} domains in a colocated deployment")
        # The lane that is ahead has up to two steps more than are kept.
        kept = (4 * times.layers + 1) * lanes * (conditions.keep_steps + 3)
        self._spans: deque[Span] = deque(maxlen=kept)
        super().__init__(
            deployment,
            times,
            elsewhere=True,
            domains=conditions.domains,
            host_seconds=conditions.host_seconds,
            disturb=disturbance(conditions.jitter, self._random),
            note=self._spans.append,
        )
        self._prompts: dict[int, list[int]] = {}
        """Length → prompt: a list for each of many sequences would take most of the memory."""
        self._requests: dict[str, _Request] = {}
        self._done: list[_Request] = []
        self._count, self._read_steps = 0, [0] * lanes
        self._counted: list[list[tuple[float, int]]] = [[] for _ in range(lanes)]
        """Ends and tokens of every lane's counted steps."""
        self._cached = 0
        """Tokens in the caches of their sequences."""
        self._start: tuple[float, Busy] | None = None

    def run(self) -> tuple[Result, list[Span]]:
        """Simulates to the end; returns the result and the spans of the last steps."""
        tell, last = Progress(), self._conditions.steps
        slots = self.deployment.attention.dp * self.deployment.scheduler.slots
        for _ in range(len(self._read_steps) * slots):  # at different points within their outputs
            prompt, output = self._drawn.draw(self._random)
            age = int(self._random.integers(output))
            self._add(prompt + age, output - age)
        self._idle = False
        with no_garbage_collection():
            while max(self._read_steps) < last:
                self.turn()
                tell(lambda: f"{max(self._read_steps)} of {last} steps simulated")
        return self._result(), self._kept_spans()

    def _add(self, prompt: int, output: int) -> None:
        """A request, to the domain whose turn it is."""
        name = str(self._count)
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        tokens = self._prompts.setdefault(prompt, [])
        if not tokens:
            tokens += [0] * prompt
        request = Request(request_id=name, prompt=tokens, params=params)
        self._loop.submit(request, self._count % self._conditions.domains)
        self._requests[name] = _Request(prompt)
        self._count += 1

    def _read(self) -> tuple[float, StepOutputs]:
        (lane, _), end = self._loop.in_flight[0], self._ends[0]
        news = super()._read()
        length = sum(self._deliver(output, end) for output in news[1])
        self._read_steps[lane] += 1
        if self._start is not None:
            self._counted[lane].append((end, len(news[1])))
            self._cached += length
        elif min(self._read_steps) >= self._conditions.warm_up:
            self._start = self.now, self.busy
            for request in self._requests.values():
                request.first = -1.0
        return news

    def _deliver(self, output: TokenOutput, end: float) -> int:
        """Takes a token; returns the tokens in its sequence's cache."""
        request = self._requests[output.request_id]
        if request.first < 0:
            request.first, request.tokens = end, 0
        request.last = end
        request.tokens += 1
        request.length += 1
        if output.finish_reason is not None:
            del self._requests[output.request_id]
            if self._start is not None:
                self._done.append(request)
            self._add(*self._drawn.draw(self._random))
        return request.length - 1

    def _result(self) -> Result:
        start, before = self._start or (0.0, Busy(0, 0, 0, 0))
        seconds, busy = max(self.now - start, 1e-12), self.busy
        shares = {
            f"{name}_busy": (getattr(busy, name) - getattr(before, name)) / seconds
            for name in Busy._fields
        }
        factor = self._conditions.tokens_a_step
        several = (r for r in [*self._done, *self._requests.values()] if r.tokens > 1)
        tpot = [(r.last - r.first) / (r.tokens - 1) / factor for r in several if r.first >= 0]
        role = self.deployment
        devices = self._conditions.domains * role.attention.devices
        devices += 0 if role.topology.has("colocated") else role.ffn.devices
        tokens, rate, counted = 0, 0.0, [one for steps in self._counted for one in steps]
        for steps in self._counted:  # a lane's clock runs from its first counted step
            if own := sum(each for _, each in steps[1:]):
                tokens, rate = tokens + own, rate + own / (steps[-1][0] - steps[0][0])
        rows = sum(each for _, each in counted)
        return Result(
            seconds=seconds,
            steps=len(counted),
            tokens=factor * tokens,
            tokens_per_second=factor * rate,
            tokens_per_device=factor * rate / devices,
            sequences=rows / max(1, len(counted)) * len(self._read_steps),
            context=self._cached / max(1, rows),
            finished=len(self._done),
            preemptions=sum(scheduler.num_preemptions for scheduler in self.schedulers),
            tpot=Times.of(tpot),
            **shares,
        )

    def _kept_spans(self) -> list[Span]:
        """The last whole steps of every lane."""
        steps: dict[int, set[int]] = {}
        for span in self._spans:
            if span.layer == self._times.layers:
                steps.setdefault(span.lane, set()).add(span.step)
        last = {lane: sorted(own)[-self._conditions.keep_steps :] for lane, own in steps.items()}
        return [span for span in self._spans if span.step in last.get(span.lane, ())]


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
    noisy = any(jitter.spread.values())
    return functools.partial(jitter.draw, random) if noisy else undisturbed


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collects no garbage meanwhile: millions of objects refer to each other, and none is free."""
    enable = gc.enable if gc.isenabled() else gc.disable
    gc.disable()
    try:
        yield
    finally:
        enable()
