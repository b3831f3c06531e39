"""An expert pool that serves independent attention workers, in simulated time.

A policy of `link/remote/batching.py` or `cohorts.py` decides, as in the message server. A worker
attends to its lanes in turn, each once its answer is there. It may straggle, or do nothing for a
while.
Run by `plan simulate --workers`.
"""

import itertools
from collections.abc import Hashable, Iterator
from typing import cast

import msgspec
import numpy as np

from jaxserve.link.remote.batching import Turns, Waiting
from jaxserve.planner.scenario import Scenario
from jaxserve.planner.stage_times import StepTimes, even_rows

PERIOD = 0.2
"""Seconds from one pause of worker 0 to the next."""


class ExpertPool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A deployment; `commands.yaml` says what its settings are."""

    workers: int
    fixed: float
    row: float
    lanes: int = 3
    layers: int = 61
    rows: int = 128
    link: float = 100e-6
    attend: tuple[float, float, float] = (40e-6, 0.4e-6, 0.2e-6)
    head: float = 1e-3
    context: float = 3250.0
    spread: float = 0.7
    jitter: float = 0.03
    slow: float = 1.0
    slow_part: float = 0.01
    slow_seconds: float = 0.1
    dead: tuple[float, float] = (0.0, 0.0)
    duty: float = 1.0

    @property
    def whole(self) -> bool:
        """True if worker 0 is as the others."""
        return self.duty == 1.0 and not self.dead[1]


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a simulation, without worker 0 where that dies or pauses."""

    tokens: float
    """Tokens a second and worker."""
    p50: float
    """Seconds of an iteration."""
    p99: float
    longest: float
    messages: float
    """Messages of a pass, on average."""


class _Workers:
    """Attention workers, and the messages on their way to the pool (`arrivals`: when they arrive,
    order of their leaving). A router that knows loads has dealt the longest contexts first."""

    def __init__(self, pool: ExpertPool, random: np.random.Generator):
        self._pool, self._random = pool, random
        drawn = pool.context * np.exp(
            pool.spread * random.standard_normal(pool.workers * pool.lanes * pool.rows)
        )
        dealt = np.sort(np.minimum(drawn, 32_000.0))[::-1].reshape(pool.rows, -1)
        dealt[1::2] = dealt[1::2, ::-1].copy()
        whole, row, context = pool.attend
        seconds = whole + row * pool.rows + context * dealt.sum(axis=0) / 1000
        self._seconds = seconds.reshape(pool.workers, pool.lanes).tolist()
        self._noise = _noise(random, pool.jitter)
        self._free = [0.0] * pool.workers
        self._slow = [(0.0, 0.0)] * pool.workers
        self._turn = [0] * pool.workers
        self._answers: list[dict[int, tuple[float, Waiting]]] = [{} for _ in range(pool.workers)]
        self._left = itertools.count()
        self.arrivals: list[tuple[float, int, Waiting]] = []

    def answer(self, message: Waiting, at: float) -> None:
        """Gives a worker an answer, as the message to send next. Takes answers in the order of the
        lanes, as `roles/schedule.py` does: a lane may have to wait for another one's answer."""
        worker = cast(int, message.domain)
        answers, turn, link = self._answers[worker], self._turn[worker], self._pool.link
        answers[message.lane] = at, message
        while turn in answers:
            at, message = answers.pop(turn)
            end = self._attend(worker, message, max(at, self._free[worker]))
            self._free[worker] = end
            self.arrivals.append((end + link, next(self._left), message))
            turn = self._turn[worker] = (turn + 1) % self._pool.lanes

    def _attend(self, worker: int, message: Waiting, begin: float) -> float:
        """Returns when a worker that begins with a message at `begin` has computed it."""
        pool, seconds = self._pool, self._seconds[worker][message.lane] * next(self._noise)
        if not message.layer:
            seconds += pool.head
        if pool.slow > 1:
            first, last = self._slow[worker]
            while last < begin:
                pause = pool.slow_seconds * (1 - pool.slow_part) / pool.slow_part
                first = last + self._random.exponential(pause)
                last = first + pool.slow_seconds
            self._slow[worker] = first, last
            seconds *= pool.slow if first <= begin else 1.0
        if not worker and pool.dead[0] <= begin < pool.dead[1]:
            begin = pool.dead[1]
        end = begin + seconds
        if not worker and pool.duty < 1:
            works = PERIOD * pool.duty
            periods, rest = divmod(begin, PERIOD)
            more, rest = divmod(min(rest, works) + seconds, works)
            end = (periods + more) * PERIOD + rest
        return end


def _noise(random: np.random.Generator, sigma: float) -> Iterator[float]:
    while True:
        yield from np.exp(sigma * random.standard_normal(4096)).tolist()


def expert_pool(
    made: Scenario, workers: int, context: float, spread: float, jitter: float
) -> ExpertPool:
    """Returns the pool of a deployment, with stage times of its hardware, for attention workers as
    its own, with `context` tokens of a sequence in the median; `spread` and `jitter` as in
    `ExpertPool`."""
    deployment, times = made.deployment, made.rooflines()
    groups, slots = deployment.attention.dp, deployment.scheduler.slots

    def step(context: float, domains: int = 1) -> StepTimes:
        count = domains * groups * slots
        return times.step(even_rows(domains * groups, count, count, count * context, padded=slots))

    first, one, all_workers = step(1.0), step(context), step(context, workers)
    rows, layers = groups * slots, times.layers
    attend = [float(each.attend.max(axis=1).mean()) for each in (first, one)]
    passes = [float(np.mean(each.ffn)) for each in (one, all_workers)]
    row = (passes[1] - passes[0]) / (rows * (workers - 1)) if workers > 1 else 0.0
    return ExpertPool(
        workers=workers,
        fixed=passes[0] - row * rows,
        row=row,
        lanes=deployment.lanes,
        layers=layers,
        rows=rows,
        link=float(np.mean([one.dispatch, one.combine])),
        attend=(attend[0], 0.0, 1000 * (attend[1] - attend[0]) / (context * rows)),
        head=one.leave + made.attention.step_host(made.roles.attention),
        context=context,
        spread=spread,
        jitter=jitter,
    )


def simulate_pool(
    pool: ExpertPool,
    policy: Turns,
    *,
    seed: int = 0,
    iterations: int = 100,
    warm_up: int = 20,
    domains: int = 1,
) -> Served:
    """Simulates until the lanes have gone through all layers `iterations` times on the mean.
    `domains` are groups of workers whose lanes are in cohorts of their own."""
    random = np.random.default_rng(seed)
    noise = _noise(random, 0.01)
    workers = _Workers(pool, random)
    lanes = [(worker, lane) for worker in range(pool.workers) for lane in range(pool.lanes)]
    ended, started, passes, served, now = 0, 0.0, 0, 0, 0.0
    begun, counted = dict[Hashable, float](), list[float]()
    for worker, lane in lanes:
        workers.answer(Waiting(worker, lane, 0, None, (lane, worker % domains)), 0.0)
    arrivals = workers.arrivals
    arrivals.sort(reverse=True)
    while ended < len(lanes) * (iterations + warm_up):
        batch, at = policy.take(now, idle=True)
        if not batch:
            while arrivals and arrivals[-1][0] <= at:
                now, _, message = arrivals.pop()
                if policy.put(message, now):
                    break
            else:
                now = at
            continue
        passes, served = passes + 1, served + len(batch)
        end = now + (pool.fixed + pool.row * pool.rows * len(batch)) * next(noise)
        while arrivals and arrivals[-1][0] <= end:
            now, _, message = arrivals.pop()
            policy.put(message, now)
        now = end
        policy.served(batch, now)
        for message in batch:
            message.layer += 1
            if message.layer == pool.layers:
                message.layer = 0
                ended += 1
                if started and (message.domain or pool.whole):
                    counted.append(now - begun.get(message.key, 0.0))
                begun[message.key] = now
            workers.answer(message, now + pool.link)
        arrivals.sort(reverse=True)
        if not started and ended >= len(lanes) * warm_up:
            started = now
    counted_workers = pool.workers - (not pool.whole)
    return Served(
        tokens=len(counted) * pool.rows / (now - started) / counted_workers,
        p50=float(np.percentile(counted, 50)),
        p99=float(np.percentile(counted, 99)),
        longest=max(counted),
        messages=served / passes,
    )
