"""`python -m jaxserve.bench host`: the leader's Python for one lane and step, without a device.

For every number of sequences a lane, a scheduler of three lanes whose slots are all taken runs
decode steps as the engine's loop does, each lane one step ahead of its results. Timed separately:

| measure | what |
|---|---|
| plan | `Scheduler.plan` |
| arrays | the NumPy arrays of the step, as every process of the attention role makes them |
| encode | the boundary's message to the followers |
| complete | `Scheduler.complete`, without the requests' outputs |
| outputs | one `TokenOutput` a token, which is what callers are handed |

Sampled tokens are random; requests end after their number of tokens and are replaced at once, by
prompts whose full pages are in the prefix cache, as after a hand-off: the rest is prefilled. The
clock is the thread's own CPU time: nothing here waits,
and what else the machine does is not counted. Knows nothing of JAX.
"""

import gc
import statistics
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxserve.bench.report import Measure, Part, percentile
from jaxserve.bench.workers import BenchError
from jaxserve.engine.outputs import StepResult
from jaxserve.engine.request import Request, SamplingParams
from jaxserve.engine.runtime import freeze
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.sizes import SchedulerSizes
from jaxserve.fleet.control import Boundary, shapes_digest
from jaxserve.link.session.messages import encode
from jaxserve.roles.step_arrays import LaneState
from jaxserve.roles.step_plan import StepPlan

LANES = 3
LIMIT_MS = 3.0
"""Target of plan, arrays, encode and complete together, at 2,048 sequences a lane."""
END_ID = 1
"""Never sampled."""
VOCAB = 128_000
PROMPT_TOKENS = (2048, 4096)
OUTPUT_TOKENS = 1000
FULL = 0.95
"""Share of the slots that every step of every lane has before steps are counted."""


class Shape(NamedTuple):
    """A deployment as the scheduler sees it."""

    name: str
    groups: int
    slots: int
    """A lane and DP group."""
    pages: int
    page_size: int
    max_length: int
    page_buckets: list[int]

    @property
    def sequences(self) -> int:
        """A lane."""
        return self.groups * self.slots


def _step3(slots: int) -> Shape:
    return Shape("configs/step3-v7x.yaml", 16, slots, 16000, 128, 32768, [32, 256])


DEEPSEEK = Shape("configs/deepseek-v3.yaml", 16, 96, 20000, 64, 65536, [64, 256, 1024])
SHAPES = [_step3(2), _step3(16), _step3(64), DEEPSEEK, _step3(128)]


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
    """Measures every shape."""
    for shape in SHAPES[:2] if quick else SHAPES:
        yield part_of(shape, SteadyState(shape).measure(3 if quick else 60))


def part_of(shape: Shape, times: Times) -> Part:
    """Medians, and the mean of the whole: ends and admissions come in bursts."""
    total, limit = times.total(), LIMIT_MS if shape.sequences == 2048 else None
    median = statistics.median
    measures = [
        Measure(name, median(values), "ms")
        for name, values in zip(Times._fields, times, strict=True)
    ]
    measures += [
        Measure("plan + arrays + encode + complete", median(total), "ms", limit),
        Measure("  mean", statistics.mean(total), "ms"),
        Measure("  95th percentile", percentile(total, 95), "ms"),
        Measure(f"  {LANES} lanes", LANES * median(total), "ms"),
    ]
    title = f"{shape.sequences} sequences a lane, {shape.groups} groups ({shape.name})"
    return Part(str(shape.sequences), title, measures, details=times._asdict())


class SteadyState:
    """A full scheduler, and what stands in for the device."""

    def __init__(self, shape: Shape):
        self._shape = shape
        self._random = np.random.default_rng(0)
        sizes = SchedulerSizes(
            groups=shape.groups,
            lanes=LANES,
            slots=shape.slots,
            pages=shape.pages,
            page_size=shape.page_size,
            max_length=shape.max_length,
            token_budget=2 * shape.slots,
            token_buckets=[shape.slots, 2 * shape.slots],
            page_buckets=shape.page_buckets,
            max_waiting=2**20,
            prefix_cache=True,
        )
        self._scheduler = Scheduler(sizes)
        self._lanes = [
            LaneState(shape.groups, shape.slots, shape.page_buckets[-1]) for _ in range(LANES)
        ]
        self._prompt = self._random.integers(2, VOCAB, PROMPT_TOKENS[1]).tolist()
        self._requests = 0
        self._full = False

    def measure(self, rounds: int) -> Times:
        """Milliseconds of every step, each lane one step ahead of its results."""
        self._fill()
        times = Times([], [], [], [], [])
        in_flight = [self._begin(lane)[0] for lane in range(LANES)]
        freeze()
        try:
            counted = 0
            while counted < rounds:
                fewest = min(len(plan.rows) for plan in in_flight)
                steady = fewest >= FULL * self._shape.sequences
                counted += steady
                for lane in range(LANES):
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
        for _ in range(self._shape.groups):
            self._add(1, len(self._prompt))
        while self._scheduler.has_work:
            for lane in range(LANES):
                if (plan := self._scheduler.plan(lane)) is not None:
                    self._lanes[lane].step(plan)
                    self._complete(plan)
        self._full = True
        for _ in range(LANES * self._shape.sequences):
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
        """Seconds of complete and outputs; who ended is replaced."""
        shape = self._shape.groups, self._shape.slots
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
        pages = self._random.integers(*PROMPT_TOKENS) // self._shape.page_size
        rest = self._random.integers(self._shape.page_size)
        length = prompt or int(pages) * self._shape.page_size + 1 + int(rest)
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
