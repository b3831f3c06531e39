"""`python -m jaxserve.bench host`: the leader's Python for one lane and step, without a device.

The scheduler of a shipped deployment, whose slots are all taken, runs decode steps as the engine's
loop does: each lane is one step ahead of its results. Timed separately are `Scheduler.plan`; the
step's NumPy arrays, as every process of the attention role makes them; encoding the boundary's
message to the followers; `Scheduler.complete` without outputs; and outputs, one `TokenOutput` a
token.

Sampled tokens are random. Requests end after their number of tokens and are replaced at once by
prompts whose full pages are in the prefix cache, as after a hand-off; the rest is prefilled. The
clock is the thread's own CPU time.
"""

import gc
import statistics
import time
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from jaxserve.bench.report import Measure, Part, percentile
from jaxserve.bench.workers import BenchError
from jaxserve.config.load import load_deployment
from jaxserve.engine.outputs import StepResult
from jaxserve.engine.request import Request, SamplingParams
from jaxserve.engine.runtime import freeze
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.sequence import SchedulerSizes
from jaxserve.fleet.control import Boundary, shapes_digest
from jaxserve.link.session.messages import encode
from jaxserve.roles.step_arrays import LaneState
from jaxserve.roles.step_plan import StepPlan

CASES = [*(("step3-v7x", slots) for slots in (2, 16, 64, 128)), ("deepseek-v3", 96)]
"""Shipped deployments, and slots of a lane and DP group."""
LIMIT_MS = 3.0
"""Target of plan, arrays, encode and complete together, at 2,048 sequences a lane."""
END_ID = 1
"""Never sampled."""
VOCAB = 128_000
PROMPT_TOKENS = (2048, 4096)
OUTPUT_TOKENS = 1000
FULL = 0.95
"""Share of the slots that every step of every lane has before steps are counted."""


def sizes_of(name: str, slots: int) -> SchedulerSizes:
    """Returns the sizes of a shipped deployment's scheduler with another number of slots."""
    buckets = [slots, 2 * slots]
    keys = {"slots": slots, "token_budget": buckets[-1], "token_buckets": buckets}
    made = load_deployment(name, {f"scheduler.{key}": value for key, value in keys.items()})
    return msgspec.structs.replace(SchedulerSizes.of(made, buckets), max_waiting=2**20)


class Times(NamedTuple):
    """Milliseconds of CPU a lane and step; one entry a step."""

    plan: list[float]
    arrays: list[float]
    encode: list[float]
    complete: list[float]
    outputs: list[float]

    def total(self) -> list[float]:
        """Time of the step path: everything but the outputs."""
        return [sum(parts) for parts in zip(*self[:4], strict=True)]


def measure(quick: bool) -> Iterator[Part]:
    """Measures every deployment."""
    for name, slots in CASES[:2] if quick else CASES:
        sizes = sizes_of(name, slots)
        yield part_of(name, sizes, SteadyState(sizes).measure(3 if quick else 60))


def part_of(name: str, sizes: SchedulerSizes, times: Times) -> Part:
    """Builds the report: medians, and the whole's mean, as admissions and ends come in bursts."""
    total, sequences = times.total(), sizes.groups * sizes.slots
    limit, median = LIMIT_MS if sequences == 2048 else None, statistics.median
    measures = [
        Measure(name, median(values), "ms")
        for name, values in zip(Times._fields, times, strict=True)
    ]
    measures += [
        Measure("plan + arrays + encode + complete", median(total), "ms", limit),
        Measure("  mean", statistics.mean(total), "ms"),
        Measure("  95th percentile", percentile(total, 95), "ms"),
        Measure(f"  {sizes.lanes} lanes", sizes.lanes * median(total), "ms"),
    ]
    title = f"{sequences} sequences a lane, {sizes.groups} groups (configs/{name}.yaml)"
    return Part(str(sequences), title, measures, details=times._asdict())


class SteadyState:
    """A full scheduler, and what stands in for the device."""

    def __init__(self, sizes: SchedulerSizes):
        self._sizes, self._sequences = sizes, sizes.groups * sizes.slots
        self._random = np.random.default_rng(0)
        self._scheduler = Scheduler(sizes)
        shape = sizes.groups, sizes.slots, sizes.page_buckets[-1]
        self._lanes = [LaneState(*shape) for _ in range(sizes.lanes)]
        self._prompt = self._random.integers(2, VOCAB, PROMPT_TOKENS[1]).tolist()
        self._requests = 0
        self._full = False

    def measure(self, rounds: int) -> Times:
        """Returns the milliseconds of steps, each lane one step ahead of its results."""
        self._fill()
        times = Times([], [], [], [], [])
        in_flight = [self._begin(lane)[0] for lane in range(self._sizes.lanes)]
        freeze()
        try:
            counted = 0
            while counted < rounds:
                fewest = min(len(plan.rows) for plan in in_flight)
                steady = fewest >= FULL * self._sequences
                counted += steady
                for lane in range(self._sizes.lanes):
                    plan, *begun = self._begin(lane)
                    step = *begun, *self._complete(in_flight[lane])
                    in_flight[lane] = plan
                    if steady:
                        for values, seconds in zip(times, step, strict=True):
                            values.append(1000 * seconds)
        finally:
            gc.unfreeze()
        if preemptions := self._scheduler.num_preemptions:
            raise BenchError(f"{preemptions} preemptions: too few pages for the sequences")
        return times

    def _fill(self) -> None:
        """The whole prompt once a DP group, so that the prefix caches have it, then a request for
        every slot, in the middle of its output."""
        for _ in range(self._sizes.groups):
            self._add(1, len(self._prompt))
        while self._scheduler.has_work:
            for lane in range(self._sizes.lanes):
                if (plan := self._scheduler.plan(lane)) is not None:
                    self._lanes[lane].step(plan)
                    self._complete(plan)
        self._full = True
        for _ in range(self._sizes.lanes * self._sequences):
            self._add(int(self._random.integers(1, OUTPUT_TOKENS)))

    def _begin(self, lane: int) -> tuple[StepPlan, float, float, float]:
        """The lane's next step, and the seconds of plan, arrays and encode."""
        start = time.thread_time()
        plan = self._scheduler.plan(lane)
        planned = time.thread_time()
        assert plan is not None
        encode(Boundary(plan.number, [plan], shapes_digest("", [plan])))
        encoded = time.thread_time()
        self._lanes[lane].step(plan)
        made = time.thread_time()
        return plan, planned - start, made - encoded, encoded - planned

    def _complete(self, plan: StepPlan) -> tuple[float, float]:
        """Returns the seconds of complete and of outputs. Requests that ended are replaced."""
        shape = self._sizes.groups, self._sizes.slots
        result = StepResult(self._random.integers(2, VOCAB, shape, np.int32), {}, {})
        start = time.thread_time()
        news = self._scheduler.complete(plan, result)
        completed = time.thread_time()
        outputs = list(news)
        listed = time.thread_time()
        for output in outputs:
            if output.finish_reason is not None and self._full:
                self._add(OUTPUT_TOKENS)
        return completed - start, listed - completed

    def _add(self, output: int, prompt: int | None = None) -> None:
        """A request with a prompt of this many tokens."""
        pages = self._random.integers(*PROMPT_TOKENS) // self._sizes.page_size
        rest = self._random.integers(self._sizes.page_size)
        length = prompt or int(pages) * self._sizes.page_size + 1 + int(rest)
        params = SamplingParams(max_tokens=output, temperature=0.7, top_p=0.95)
        self._scheduler.add(
            Request(
                request_id=str(self._requests),
                prompt=self._prompt[:length],
                params=params,
                eos_token_ids=frozenset({END_ID}),
                seed=self._requests,
            )
        )
        self._requests += 1
