"""A fleet in simulated time: the router's coordinator, prefill workers, the pages link, domains.

Called by `plan simulate`. The coordinator is the router's own (`coordinator.py`), and so are the
engines' schedulers and loops; simulated are the devices (`planner/lanes.py`), the link over which
KV pages go, and the clock. Events come in the order of time: an engine takes its turn when nothing
else is due before it.

Not simulated: leases that run out, requests that move between domains, what the router itself
takes, the memory of pages that a prefill worker holds, of which `pages.held` bounds the number, and
what a domain beside prefill workers takes for a prompt that it computes itself: one token's work.
"""

import functools
import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jaxserve.config.deployment import Deployment
from jaxserve.config.load import deployment_of
from jaxserve.engine.outputs import StepOutputs
from jaxserve.engine.request import Request, SamplingParams, TokenOutput
from jaxserve.errors import ConfigError, OverloadedError
from jaxserve.fleet.coordinator import Coordinator
from jaxserve.fleet.estimates import blocks_of
from jaxserve.fleet.registry import placed
from jaxserve.fleet.routed import Action, Job, Routed, SendPrefill, SendSubmit
from jaxserve.fleet.worker_frames import WorkerFacts, WorkerRole
from jaxserve.link.pages.source import NOTHING_HELD, PagesSource
from jaxserve.planner.demand import Lengths
from jaxserve.planner.deploy_fleet import Handoff
from jaxserve.planner.noise import Jitter
from jaxserve.planner.results import FleetResult, Times
from jaxserve.planner.simulate import (
    Progress,
    SimulatedEngine,
    disturbance,
    no_garbage_collection,
)
from jaxserve.planner.stage_times import StageTimes

SHARED = 2**30
"""The first token id of beginnings that prompts share; those of requests are their numbers."""
RUNNING, OWN = "running ", 2**29
"""Beginning of the ids of sequences that run at the start, and the first of their token ids."""
LEAST_TOKENS = 8
"""Tokens after which a request that has not ended has a pace."""


class SimulatedCoordinator(Coordinator):
    """The router's coordinator, which takes the tokens of a whole step at once."""

    def log(self, runs: Iterator[tuple[int, tuple[str, list[int] | None]]]) -> int | None:
        """Logs a step's runs of tokens while they need no other action. Returns the number of the
        first run that does, and that is not logged; None if all are logged.

        Args:
          runs: number, and attempt with tokens (None if the output holds more than tokens).
        """
        now, last = self._clock(), None
        for number, (attempt, tokens) in runs:
            request = self._attempts.get(attempt)
            if request is None or not tokens or attempt != request.attempt:
                return number
            worker = request.worker
            if request.last_at is None or request.prefill is not None or worker is None:
                return number
            self._estimates.paced(worker, (now - request.last_at) / len(tokens))
            if worker is not last:
                self.placement.changed(worker)
                last = worker
            request.last_at = now
            request.emitted += tokens
        return None


class FleetTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that arrive at the fleet.

    Attributes:
      rate: requests a second, at random (Poisson) or evenly spaced.
      requests: number of requests.
      warm_up: number of first requests that do not count.
      cool_down: number of last requests that do not count, as they find an emptying fleet.
      shared: tokens of a beginning that a prompt shares with others.
      prefixes: number of such beginnings, all equally frequent.
      hits: share of every prompt, beside `shared`, that is the beginning of a text common to all
        prompts; every DP group that computes prompts has it at the start.
      running: cache lengths, and tokens still to come, of sequences that decode at the start. With
        them the simulation ends when the last request has its first token, since the fleet would go
        on; without them it begins and ends empty.
      percents: percentiles of TTFT and TPOT that are reported beside the usual ones.
    """

    lengths: Lengths
    rate: float
    requests: int
    warm_up: int = 0
    cool_down: int = 0
    even: bool = False
    shared: int = 0
    prefixes: int = 1
    hits: float = 0.0
    running: tuple[tuple[int, int], ...] = ()
    percents: tuple[float, float] = (95.0, 95.0)


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """Loss of a worker with all its state.

    Attributes:
      worker: "prefill 0", "domain 1", …
      at: seconds after the start.
      seconds: until the worker returns, with empty caches.
    """

    worker: str
    at: float
    seconds: float


class FleetConditions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the fleet; fields have the meaning of those in `planner.simulate`.

    Attributes:
      request_seconds: added to every TTFT: HTTP, the router and its messages.
      tokens_a_step: tokens that a sequence gains with each simulated token.
      step_seconds: of a simulated step that decodes, where it stands for several.
      attention_cost: as in `WorkerFacts`.
    """

    pages: Handoff = Handoff()
    host_seconds: float = 0.0
    jitter: Jitter = Jitter()
    seed: int = 0
    losses: tuple[Loss, ...] = ()
    request_seconds: float = 0.0
    tokens_a_step: float = 1.0
    step_seconds: float = 0.0
    attention_cost: float = 0.0


class _Seen(msgspec.Struct):
    """A request as the simulation knows it."""

    arrival: float
    output: int
    prefill_wait: float | None = None
    pages_wait: float | None = None
    domain_wait: float = 0.0
    first: float = -1.0
    early: float = 0.0
    """Seconds from the first token to the end of a step that stands for several."""
    last: float = -1.0
    tokens: int = 0


class _Worker(NamedTuple):
    role: WorkerRole
    engine: SimulatedEngine
    again: Callable[[], SimulatedEngine]
    """Makes it anew, as it was at its start."""
    reserved: bool


class FleetSimulation:
    """One run; `run` once.

    Args:
      deployment: of the fleet; a domain's part of it is what each domain runs. In `afd` mode all
        domains are around one ffn worker, and one worker to the router; there may be several such
        workers in `fleet.domains`.
      domain, prefill: stage times of the two roles' engines.
    """

    def __init__(
        self,
        deployment: Deployment,
        traffic: FleetTraffic,
        conditions: FleetConditions,
        domain: StageTimes,
        prefill: StageTimes | None = None,
    ):
        self._traffic, self._conditions = traffic, conditions
        self._random = np.random.default_rng(conditions.seed)
        lengths = traffic.lengths.sample(np.random.default_rng(conditions.seed), traffic.requests)
        self._lengths = np.transpose(lengths).tolist()
        self._without_token = traffic.requests
        """Requests that have not had their first token yet, those to come included."""
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._coordinator = SimulatedCoordinator(deployment, "simulated", lambda: self._now)
        self._workers: dict[str, _Worker] = {}
        self._link_free: dict[str, float] = {}
        self._seen: dict[str, _Seen] = {}
        self._attempts: dict[str, str] = {}  # attempt → request id
        self._sent: dict[str, float] = {}  # attempt → when it is at its worker
        self._refused = 0
        self._lookups = np.zeros(2)  # tokens looked for and found in lost prefill workers
        workers = deployment.prefill.workers if prefill is not None else 0
        if workers and prefill is not None:
            again = functools.partial(self._engine, deployment_of(deployment, "prefill"), prefill)
            self._add("prefill", workers, deployment.prefill.long_workers, again)
        self._elsewhere = workers > 0
        together = deployment.domains if deployment.topology.has("ffn") else 1
        asked = {"elsewhere": self._elsewhere, "domains": together}
        again = functools.partial(self._engine, deployment, domain, **asked)
        self._add("domain", decode_workers(deployment), deployment.fleet.long_domains, again)
        for loss in conditions.losses:
            if loss.worker not in self._workers:
                known = ", ".join(self._workers)
                raise ConfigError(f"lost worker {loss.worker!r}: there are {known}")
            self._at(loss.at, functools.partial(self._lose, loss))

    def _add(
        self, role: WorkerRole, count: int, long: int, again: Callable[[], SimulatedEngine]
    ) -> None:
        """Adds the workers of a role, with `long` of them reserved."""
        for place in placed(role, [f"{role} {number}" for number in range(count)], long):
            self._workers[place.address] = _Worker(role, again(), again, place.reserved)

    def run(self) -> FleetResult:
        """Simulates until every request has ended; with `running`, has had its first token."""
        workers, tell = self._workers.items(), Progress()
        # Sequences that run at the start meet no prefill workers, and so go to domains at once.
        for name, worker in ((n, w) for n, w in workers if w.role == "domain"):
            self._start(name, worker)
        for number, (length, left) in enumerate(self._traffic.running):
            self._submit(f"{RUNNING}{number}", [OWN + number] * length, left, whole=True)
        for name, worker in ((n, w) for n, w in workers if w.role == "prefill"):
            self._start(name, worker)
        for number, at in enumerate(self._arrivals()):
            self._at(at, functools.partial(self._arrive, number))
        with no_garbage_collection():
            while not (self._traffic.running and not self._without_token) and self._turn():
                tell(lambda: f"{self._now:.1f} s simulated, {self._without_token} requests to come")
        return self._result()

    def _arrivals(self) -> list[float]:
        """Times of the requests, at exactly the rate on the mean."""
        count, even = self._traffic.requests, self._traffic.even
        gaps = np.ones(count) if even else self._random.exponential(1.0, count)
        gaps *= count / gaps.sum()
        return np.cumsum(gaps / self._traffic.rate).tolist()

    def _turn(self) -> bool:
        """The next event, or the turn of the engine that is due first; False: nothing is left."""
        name, worker = min(self._workers.items(), key=lambda item: item[1].engine.next_at)
        due = worker.engine.next_at
        if self._events and self._events[0][0] <= due:
            self._now, _, happen = heapq.heappop(self._events)
            happen()
        elif due < float("inf"):
            for at, outputs in worker.engine.turn():
                self._at(at, functools.partial(self._news, name, worker.engine, outputs))
        else:
            return False
        return True

    def _engine(self, deployment: Deployment, times: StageTimes, **asked: Any) -> SimulatedEngine:
        return SimulatedEngine(
            deployment,
            times,
            prefixes=self._traffic.shared > 0 or self._traffic.hits > 0,
            host_seconds=self._conditions.host_seconds,
            disturb=disturbance(self._conditions.jitter, self._random),
            **asked,
        )

    def _lose(self, loss: Loss) -> None:
        """A worker and what it has are gone; what it still had to say is not heard."""
        worker = self._workers[loss.worker]
        self._lookups += _lookups(worker)
        self._workers[loss.worker] = back = worker._replace(engine=worker.again())
        self._act(self._coordinator.left(loss.worker))
        self._at(self._now + loss.seconds, functools.partial(self._join, loss.worker, back))

    def _start(self, name: str, worker: _Worker) -> None:
        """Joins a worker. If it computes prompts, it holds their common beginnings, and the router
        is told: otherwise the router would prefer workers to which it has sent some before."""
        found = int(self._traffic.hits * max(prompt for prompt, _ in self._lengths))
        computes = worker.role == "prefill" or not self._elsewhere
        prefixes = range(self._traffic.prefixes if found and computes else 0)
        prompts = [[SHARED + prefix] * found for prefix in prefixes]
        for prompt in prompts:
            worker.engine.warm(prompt)
        self._join(name, worker)
        for prompt in prompts:
            self._coordinator.placement.index.add(name, blocks_of(prompt, ""))

    def _join(self, name: str, worker: _Worker) -> None:
        made, limits = worker.engine.deployment, worker.engine.deployment.scheduler
        groups = made.attention.dp * len(worker.engine.schedulers)
        facts = WorkerFacts(
            role=worker.role,
            slots=limits.slots * made.lanes * groups,
            groups=groups,
            pages=made.cache.pages,
            page_size=made.cache.page_size,
            max_length=limits.max_length,
            vocab=2**31 - 1,
            eos_token_ids=[],
            info={},
            attention_cost=self._conditions.attention_cost,
        )
        self._act(self._coordinator.joined(name, facts, worker.reserved))

    def _at(self, at: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), happen))

    def _arrive(self, number: int) -> None:
        prompt, output = self._lengths[number]
        shared = min(max(self._traffic.shared, int(self._traffic.hits * prompt)), prompt)
        first = int(self._random.integers(self._traffic.prefixes)) if shared else 0
        # What follows is its own, which no prefix cache has.
        tokens = [SHARED + first] * shared + [number] * (prompt - shared)
        if not self._submit(str(number), tokens, output):
            self._refused += 1
            self._without_token -= 1

    def _submit(self, name: str, tokens: list[int], output: int, *, whole: bool = False) -> bool:
        """Gives a request to the router; False: it has no room for it."""
        job = Job(request_id=name, prompt=tokens, max_tokens=output, whole=whole)
        self._seen[name] = _Seen(self._now, output)
        try:
            self._act(self._coordinator.submit(job))
        except OverloadedError:
            del self._seen[name]
            return False
        return True

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SendPrefill(worker, attempt, request, priority):
                    self._send(worker, attempt, request, 1, priority, self._now)
                case SendSubmit(worker, attempt, request):
                    seen = self._seen[request.job.request_id]
                    there = self._now
                    if request.source is not None and request.prefill is not None:
                        there = self._hand_over(request.prefill.name, worker, request)
                        seen.pages_wait = there - self._now
                        assert request.computed_at is not None
                        seen.domain_wait = self._now - request.computed_at
                    else:
                        seen.domain_wait = self._now - seen.arrival
                    left = seen.output - len(request.emitted)
                    self._send(worker, attempt, request, left, 0, there)

    def _send(
        self, worker: str, attempt: str, request: Routed, tokens: int, priority: int, at: float
    ) -> None:
        """A request goes to a worker, where it is at a time."""
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, priority=priority)
        self._attempts[attempt] = request.job.request_id
        self._sent[attempt] = at
        made = Request(request_id=attempt, prompt=request.tokens, params=params, arrival=at)
        self._workers[worker].engine.submit(made, at)

    def _hand_over(self, prefill: str, domain: str, request: Routed) -> float:
        """When a hand-off that is asked for now has come."""
        assert request.source is not None
        params = SamplingParams(ignore_eos=True)
        made = Request(request_id="", prompt=request.tokens, params=params, arrival=self._now)
        engine = self._workers[domain].engine
        known = max(scheduler.cached_tokens(made) for scheduler in engine.schedulers)
        return self._cross(prefill, domain, max(0, request.source.tokens - known))

    def _cross(self, prefill: str, domain: str, tokens: int) -> float:
        """When the entries of tokens that are asked for now have crossed: their bytes follow those
        that either end moves already."""
        if not tokens:
            return self._now
        pages = self._conditions.pages
        for end in (prefill, domain):
            free = max(self._now, self._link_free.get(end, 0.0))
            self._link_free[end] = free + pages.seconds(tokens)
        return max(self._link_free[prefill], self._link_free[domain]) + pages.latency

    def _news(self, name: str, engine: SimulatedEngine, outputs: StepOutputs) -> None:
        """A worker tells the router what it has at one time."""
        worker = self._workers[name]
        if worker.engine is not engine:
            return  # it was lost meanwhile
        runs = enumerate(outputs.runs())
        while (number := self._coordinator.log(runs)) is not None:
            self._take(name, worker, outputs.at(number))

    def _take(self, name: str, worker: _Worker, output: TokenOutput) -> None:
        attempt = output.request_id
        seen = self._seen[self._attempts[attempt]]
        if worker.role == "prefill":
            seen.prefill_wait = self._sent[attempt] - seen.arrival + output.queue_seconds
            computed = self._coordinator.requests[self._attempts[attempt]].tokens
            size = worker.engine.deployment.cache.page_size
            tokens = (len(computed) - 1) // size * size  # whole pages of all but the last
            source = PagesSource(name, attempt, tokens, "") if tokens else NOTHING_HELD
            self._act(self._coordinator.held(attempt, source))
            return
        if seen.first < 0 and output.token_ids:
            seen.first, seen.domain_wait = self._now, seen.domain_wait + output.queue_seconds
            queued, step = output.queue_seconds, self._conditions.step_seconds
            own = self._now - self._sent[attempt] - queued
            # It waits for a step under way, before its plan or behind it, and for its own; steps
            # that compute prompts take as long for their tokens, however many they stand for.
            decoding = min(queued, step) + min(own, (1 + self._elsewhere) * step)
            seen.early = decoding * (1 - 1 / self._conditions.tokens_a_step)
            self._without_token -= not self._attempts[attempt].startswith(RUNNING)
        request, actions = self._coordinator.output(attempt, output)
        if request is not None and request.last_at is not None:
            seen.last, seen.tokens = request.last_at, len(request.emitted)
        self._act(actions)

    def samples(self) -> tuple[list[float], list[float]]:
        """TTFT and TPOT of every request that counts, in seconds. Sequences that ran at the start,
        or run at the end, have a pace by the tokens that they got."""
        late, paced = self._conditions.request_seconds, self._counted()
        ttft = [seen.first - seen.early - seen.arrival + late for seen in paced]
        if self._traffic.running:
            for name, request in self._coordinator.requests.items():
                if request.last_at is not None:
                    seen = self._seen[name]
                    seen.last, seen.tokens = request.last_at, len(request.emitted)
            paced = [seen for seen in self._seen.values() if seen.tokens > LEAST_TOKENS]
        steps, several = self._conditions.tokens_a_step, [s for s in paced if s.tokens > 1]
        return ttft, [(s.last - s.first) / (s.tokens - 1) / steps for s in several]

    def _counted(self) -> list[_Seen]:
        numbers = range(self._traffic.warm_up, self._traffic.requests - self._traffic.cool_down)
        found = (self._seen.get(str(number)) for number in numbers)
        return [seen for seen in found if seen is not None and seen.first >= 0]

    def _result(self) -> FleetResult:
        counted = self._counted()
        begin = min((seen.arrival for seen in counted), default=0.0)
        end = max((seen.last for seen in counted), default=0.0)
        samples = self.samples()
        ttft_asked, tpot_asked = (
            float(np.percentile(each or [0.0], percent))
            for each, percent in zip(samples, self._traffic.percents, strict=True)
        )
        waits: dict[str, list[float]] = {
            role: [wait for one in counted if (wait := getattr(one, f"{role}_wait")) is not None]
            for role in ("prefill", "pages", "domain")
        }
        busy: dict[str, list[float]] = {}
        asked, found = self._lookups + sum(map(_lookups, self._workers.values()))
        for worker in self._workers.values():
            times, length = worker.engine.busy, max(self._now, 1e-12)
            own = times.attention
            if worker.engine.deployment.topology.has("colocated"):
                own += times.ffn
            elif worker.role == "domain":
                busy.setdefault("ffn", []).append(times.ffn / length)
            busy.setdefault(worker.role, []).append(own / length)
        return FleetResult(
            seconds=end - begin,
            finished=len(counted),
            refused=self._refused,
            tokens_per_second=sum(seen.tokens for seen in counted) / max(end - begin, 1e-12),
            ttft=Times.of(samples[0]),
            tpot=Times.of(samples[1]),
            ttft_asked=ttft_asked,
            tpot_asked=tpot_asked,
            waits={role: Times.of(each) for role, each in waits.items()},
            replays=self._coordinator.replays,
            found=float(found / max(1, asked)),
            busy={role: float(np.mean(shares)) for role, shares in busy.items()},
        )


def decode_workers(deployment: Deployment) -> int:
    """Workers that decode, as the router sees them."""
    if deployment.topology.has("colocated"):
        return deployment.domains
    return 1 if deployment.topology.crosses_runtimes else max(1, len(deployment.fleet.domains))


def _lookups(worker: _Worker) -> np.ndarray:
    """Tokens that were looked for and found in a prefill worker's prefix caches."""
    queues = [each.queue for each in worker.engine.schedulers if worker.role == "prefill"]
    return np.sum([(q.prompt_tokens, q.prompt_tokens_found) for q in queues] or [(0, 0)], axis=0)
