"""The prefill fleet: what a worker takes for a prompt, and how many of them a rate needs.

Called by `deploy.py`. A worker is a colocated deployment that computes prompts in chunks: every DP
group works on a prompt of its own, `chunk` tokens of it in a step, and all groups step together,
because the experts are divided over them. A step's seconds are those of the rooflines.
"""

from typing import NamedTuple

import numpy as np

from jaxserve.planner.deploy_demand import Requests
from jaxserve.planner.deploy_queue import MOST, Waiting, waiting
from jaxserve.planner.deploy_times import colocated_seconds, rows_of
from jaxserve.planner.hardware import Hardware
from jaxserve.planner.layouts import Layout
from jaxserve.planner.noise import ExpertLoads
from jaxserve.planner.stage_times import Rooflines
from jaxserve.planner.stages import Calculator

CHUNKS = (1024, 2048, 4096, 8192)
"""Tokens of a DP group and step, to try."""
DRAWS = 48
"""Chunks that stand for all, and DP groups of full steps."""


class PrefillWorker(NamedTuple):
    """One worker.

    Attributes:
      chunk: tokens of a DP group and step.
    """

    layout: Layout
    chunk: int
    hardware: Hardware

    @property
    def hosts(self) -> int:
        """Servers, or parts of one, that it takes."""
        return -(-self.layout.devices // self.hardware.devices_per_host)


class Chunk(NamedTuple):
    """Of a prompt, in a step."""

    tokens: int
    length: int
    """Of the sequence's cache after it."""


class Steps(NamedTuple):
    """Seconds of a worker's steps.

    Attributes:
      alone: with one prompt in the worker.
      full: with a chunk in every DP group.
    """

    alone: float
    full: float

    def busy(self, load: float) -> float:
        """Share of the DP groups that have something to do.

        Args:
          load: chunks that come to a DP group a second.
        """
        rest = 1 - load * (self.full - self.alone)
        return load * self.alone / rest if rest > 0 else float("inf")

    def seconds(self, busy: float) -> float:
        """Of a step with so many of the groups busy."""
        return self.alone + busy * (self.full - self.alone)


class PrefillTimes(NamedTuple):
    """Of one request after the other, in seconds."""

    queue: Waiting
    step: float
    compute: np.ndarray
    """Of equally likely requests, from when a DP group is free."""


def steps_of(
    worker: PrefillWorker,
    calculator: Calculator,
    requests: Requests,
    experts: ExpertLoads | None = None,
) -> Steps:
    """What steps take with such prompts."""
    layout, chunk = worker.layout, worker.chunk
    hardware = worker.hardware, worker.hardware
    times = Rooflines(layout, calculator, calculator, hardware, experts)
    random = np.random.default_rng(0)

    def seconds(chunks: list[list[Chunk]]) -> float:
        """Of a step with such chunks in the DP groups."""
        group = np.repeat(np.arange(len(chunks)), [len(one) for one in chunks])
        tokens, length = np.array([chunk for one in chunks for chunk in one]).T
        return colocated_seconds(times, rows_of(layout, group, tokens, length))

    alone = np.mean([seconds([[one]]) for one in typical_chunks(requests, chunk)])
    full = np.mean(
        [
            seconds([_packed(random, requests, chunk) for _ in range(layout.dp)])
            for _ in range(max(1, DRAWS // layout.dp))
        ]
    )
    return Steps(float(min(full, alone)), float(full))


def typical_chunks(requests: Requests, chunk: int) -> list[Chunk]:
    """Equally likely chunks of prompts that are computed one after the other."""
    counts = -(-requests.computed // chunk)
    which = np.repeat(np.arange(len(counts)), counts)
    begin = chunk * (np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts))
    tokens = np.minimum(chunk, requests.computed[which] - begin)
    length = requests.found[which] + begin + tokens
    order = np.argsort(tokens * length, kind="stable")
    places = ((np.arange(DRAWS) + 0.5) * len(order) / DRAWS).astype(int)
    return [Chunk(int(tokens[place]), int(length[place])) for place in order[places]]


def _packed(random: np.random.Generator, requests: Requests, chunk: int) -> list[Chunk]:
    """A DP group's part of a step, into which prompts follow until it is full."""
    computed = requests.computed
    share = computed / computed.sum()
    chunks: list[Chunk] = []
    while (room := chunk - sum(one.tokens for one in chunks)) > 0:
        which = int(random.choice(len(computed), p=share))
        begin = int(random.integers(-(-computed[which] // chunk))) * chunk
        tokens = min(room, int(computed[which]) - begin)
        chunks.append(Chunk(tokens, int(requests.found[which]) + begin + tokens))
    return chunks


def prefill_times(
    worker: PrefillWorker, steps: Steps, requests: Requests, rate: float, workers: int
) -> PrefillTimes | None:
    """How long requests take in so many workers; None: they are too few."""
    groups = workers * worker.layout.dp
    chunks = requests.computed / worker.chunk
    busy = steps.busy(rate * float(chunks.mean()) / groups)
    if not 0 <= busy < MOST:
        return None
    step = steps.seconds(busy)
    queue = waiting(rate, chunks * step, groups)
    if queue is None:
        return None
    # Groups step together: who comes while others compute waits for the rest of their step, and
    # for the one that is enqueued.
    others = 1 - (1 - busy) ** worker.layout.dp
    compute = np.ceil(chunks) * step + others * 1.5 * step
    return PrefillTimes(queue, step, compute)


def capacity(worker: PrefillWorker, steps: Steps, requests: Requests) -> float:
    """Tokens of prompts a second, found ones included, of a worker that is always busy."""
    share = float(requests.prompt.mean() / requests.computed.mean())
    return worker.layout.dp * worker.chunk / steps.full * share
