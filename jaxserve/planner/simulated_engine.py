"""An engine in simulated time: the engine's own schedulers and loop, on devices of `lanes.py`.

The parts are those of `simulate.py`, which runs one deployment to a number of steps; here an engine
takes requests as they come and says when their tokens are there, so that several of them, and a
router, can run in one simulated time (`fleet/simulation.py`).
"""

import heapq
import itertools
from collections import deque
from typing import NamedTuple

import numpy as np

from jaxserve.config.deployment import Deployment
from jaxserve.engine.admission import choose_domain
from jaxserve.engine.loop import Await, Enqueue, Loop
from jaxserve.engine.outputs import StepOutputs, StepResult
from jaxserve.engine.request import Request
from jaxserve.engine.scheduler import Scheduler
from jaxserve.planner.lanes import Busy, Disturb, LinkMode, undisturbed
from jaxserve.planner.pipeline import pipeline_of
from jaxserve.planner.stage_times import Rows, StageTimes
from jaxserve.roles.step_plan import StepPlan

NEVER = float("inf")


def make_scheduler(deployment: Deployment, *, elsewhere: bool, prefixes: bool = False) -> Scheduler:
    """The scheduler of a domain.

    Args:
      elsewhere: a prompt's cache comes ready from a prefill worker: it is one step's work, whatever
        its length.
      prefixes: whether prompts begin alike, so that there is something to find in a prefix cache.
    """
    limits, cache = deployment.scheduler, deployment.cache
    budget = limits.slots * limits.max_length if elsewhere else limits.token_budget
    return Scheduler(
        groups=deployment.attention.dp,
        lanes=deployment.lanes,
        slots=limits.slots,
        pages=cache.pages,
        page_size=cache.page_size,
        max_length=limits.max_length,
        token_budget=budget,
        token_buckets=sorted({*([] if elsewhere else limits.token_buckets), budget}),
        page_buckets=limits.page_buckets,
        max_waiting=2**20,
        prefill_tokens=0 if elsewhere else limits.prefill_tokens,
        prefix_cache=prefixes and cache.prefix,
    )


def rows_of(deployment: Deployment, plan: StepPlan, *, elsewhere: bool) -> Rows:
    """The sequences of a step, for its times; `elsewhere` as above."""
    group, tokens = plan.rows // deployment.scheduler.slots, plan.token_counts
    padded = plan.bucket.tokens
    if elsewhere:
        tokens = np.ones_like(tokens)
        most = np.bincount(group).max()
        sizes = deployment.scheduler.token_buckets
        padded = next((size for size in sizes if size >= most), int(most))
    sampled = min(padded, deployment.scheduler.slots)
    reach = plan.bucket.pages * deployment.cache.page_size
    return Rows(deployment.attention.dp, group, tokens, plan.kv_lengths, padded, reach, sampled)


class News(NamedTuple):
    """Outputs, and when the engine had them."""

    at: float
    outputs: StepOutputs


class SimulatedEngine:
    """Called with nondecreasing times: `submit` no earlier than the last `turn` of any engine.

    Args:
      elsewhere: whether prompts come with their KV entries.
      prefixes: whether prompts begin alike.
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
        link: LinkMode = "duplex",
        host_seconds: float = 0.0,
        disturb: Disturb = undisturbed,
    ):
        self.deployment = deployment
        self._times, self._elsewhere, self._host = times, elsewhere, host_seconds
        groups, lanes = deployment.attention.dp, deployment.lanes
        self._pipeline = pipeline_of(
            deployment.topology,
            times,
            lanes=lanes,
            groups=groups,
            domains=domains,
            link=link,
            disturb=disturb,
        )
        self.schedulers = [
            make_scheduler(deployment, elsewhere=elsewhere, prefixes=prefixes)
            for _ in range(domains)
        ]
        self.now = 0.0
        self._loop = Loop(self.schedulers, lanes * domains, lambda: self.now)
        self._sampled = StepResult(np.zeros((groups, deployment.scheduler.slots), np.int32), {}, {})
        self._ends: deque[float] = deque()
        self._arrivals: list[tuple[float, int, Request]] = []
        self._numbers = itertools.count()
        self._idle = True
        self._steps = 0

    @property
    def busy(self) -> Busy:
        """Busy seconds so far."""
        return self._pipeline.busy

    @property
    def next_at(self) -> float:
        """When the engine does something next."""
        if not self._idle:
            return self.now
        return max(self.now, self._arrivals[0][0]) if self._arrivals else NEVER

    def submit(self, request: Request, at: float) -> None:
        """A request comes; its arrival is set to that."""
        heapq.heappush(self._arrivals, (at, next(self._numbers), request))

    def turn(self) -> list[News]:
        """Carries out one action of the loop, at `next_at`."""
        self.now, self._idle = self.next_at, False
        news: list[News] = []
        while self._ends and self._ends[0] <= self.now:
            news.append(self._read())
        while self._arrivals and self._arrivals[0][0] <= self.now:
            _, _, request = heapq.heappop(self._arrivals)
            self._loop.submit(request, choose_domain(self.schedulers, request))
        match self._loop.next(self._pipeline.idle_lanes):
            case Enqueue(steps):
                for lane, plan in steps:
                    rows = rows_of(self.deployment, plan, elsewhere=self._elsewhere)
                    self._pipeline.begin(lane, self._steps, self.now, self._times.step(rows))
                    self._steps += 1
                self.now += self._host
                lane, end = self._pipeline.advance(self.now)
                self._loop.enqueued(lane)
                self._ends.append(end)
            case Await():
                news.append(self._read())
            case _:
                self._idle = True
        return news

    def _read(self) -> News:
        """Waits for the oldest step in flight and takes its result."""
        lane, plan = self._loop.in_flight[0]
        self.now = max(self.now, self._ends.popleft())
        return News(self.now, self._loop.complete(lane, plan, self._sampled))
