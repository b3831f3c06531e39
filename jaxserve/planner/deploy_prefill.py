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
"""DP groups whose chunks stand for all."""


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
    computed = requests.computed

    def seconds(groups: int, *, packed: bool) -> float:
        found = []
        for _ in range(max(1, DRAWS // groups)):
            rows = [_chunk(random, requests, computed, chunk, packed) for _ in range(groups)]
            group = np.repeat(np.arange(groups), [len(tokens) for tokens, _ in rows])
            tokens = np.concatenate([tokens for tokens, _ in rows])
            length = np.concatenate([length for _, length in rows])
            step = rows_of(layout, group, tokens, length)
            found.append(colocated_seconds(layout, times, step))
        return float(np.mean(found))

    full = seconds(layout.dp, packed=True)
    return Steps(min(full, seconds(1, packed=False)), full)


def _chunk(
    random: np.random.Generator,
    requests: Requests,
    computed: np.ndarray,
    chunk: int,
    packed: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """A DP group's part of a step: tokens and cache lengths of the prompts in it.

    Args:
      packed: whether further prompts follow, until the chunk is full.
    """
    tokens: list[int] = []
    lengths: list[int] = []
    while not tokens or (packed and sum(tokens) < chunk):
        which = int(random.choice(len(computed), p=computed / computed.sum()))
        own, room = int(computed[which]), chunk - sum(tokens)
        begin = int(random.integers(-(-own // chunk))) * chunk
        now = min(room, own - begin)
        tokens.append(now)
        lengths.append(int(requests.found[which]) + begin + now)
    return np.array(tokens), np.array(lengths)


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
