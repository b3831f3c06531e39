"""`python -m jaxserve.bench plans`: the leader's CPU for a step's plan to processes that follow.

Followers are real processes over loopback that claim to be on hosts of eight: 1, 7 and 31 of them.
Counted is the CPU of the whole process, threads of libraries included, without that of an idle
leader; and of followers that hand on. Latency is from the call until the last follower has decoded
the plan; it depends on the number of cores.
"""

import statistics
import subprocess
import time
from collections.abc import Iterator

import msgspec
import numpy as np

from jaxserve.bench.report import Measure, Part
from jaxserve.bench.workers import BenchError, Worker
from jaxserve.config.deployment import Cluster
from jaxserve.errors import EngineFailedError
from jaxserve.fleet.control import Boundary, Identity, shapes_digest
from jaxserve.fleet.follower import Follower
from jaxserve.fleet.leader import Leader
from jaxserve.roles.layout import Bucket
from jaxserve.roles.step_plan import StepPlan

FOLLOWERS = (1, 7, 31)
HOST = 8
"""Processes of a host."""
ROWS = 2048
"""Sequences of a lane."""
STEP_SECONDS = 0.01
LAYERS = 61
LIMIT_US = 15.0
"""Target for a lane's layer, at 31 followers."""
_TOKEN = "bench"
_CLUSTER = Cluster(start_seconds=300.0, step_seconds=120.0, heartbeat_seconds=20.0)


class Seen(msgspec.Struct):
    """Record of a follower: `time.monotonic` at the arrival of each boundary, and CPU seconds."""

    times: list[float]
    cpu: float


class MeasuredLeader(Leader):
    """A leader that can wait for its followers."""

    def settle(self) -> None:
        """Waits until all followers have carried out all plans.

        Raises:
          BenchError: they do not within a minute.
        """
        deadline = time.monotonic() + 60.0
        while any(each.completed < self._next - 1 for each in self._followers.values()):
            if time.monotonic() > deadline:
                raise BenchError(f"plans: followers are late: {self.describe()}")
            time.sleep(0.1)


def measure(quick: bool) -> Iterator[Part]:
    """Measures all numbers of followers."""
    for count in FOLLOWERS[:2] if quick else FOLLOWERS:
        yield part_of(count, measure_followers(count, quick))


def plan(number: int) -> StepPlan:
    """Builds a decode step of `ROWS` sequences; every 128th gets a page."""
    rows = np.arange(ROWS, dtype=np.int32)
    ones, pages = np.ones_like(rows), rows[::128]
    return StepPlan.of(
        lane=number % 3,
        number=number,
        bucket=Bucket(128, 32),
        columns=np.stack([rows, ones, 4096 + ones, ones]),
        token_ids=-ones,
        new_sequences=[],
        new_pages=np.stack([pages, ones[::128], pages]),
        options=[],
    )


def _identity(process: int, processes: int) -> Identity:
    host = f"host{process // HOST}"
    return Identity(process_id=process, role="ffn", host=host, pid=process, processes=processes)


def measure_followers(count: int, quick: bool) -> dict[str, list[float]]:
    """Microseconds of a step in each round, by name; starts and ends the followers."""
    rounds, steps = (3, 20) if quick else (7, 100)
    failures: list[EngineFailedError] = []
    leader = MeasuredLeader(
        _identity(0, count + 1),
        address="127.0.0.1:0",
        token=_TOKEN,
        cluster=_CLUSTER,
        on_failure=failures.append,
    )
    leader.start()
    # Without a leader they end by themselves. gRPC would not bear a function before exec.
    shared = {"address": leader.address, "processes": count + 1}
    followers = [Worker(follow, {**shared, "process": n}) for n in range(1, count + 1)]
    processes = [subprocess.Popen(each.command(), env=each.environment()) for each in followers]
    try:
        leader.wait_ready(_CLUSTER.start_seconds)
        found = _rounds(leader, rounds, steps)
    finally:
        leader.close()
        for process in processes:
            process.wait(60.0)
    if failures:
        raise BenchError(f"plans: {failures[0]}")
    return found


def part_of(count: int, found: dict[str, list[float]]) -> Part:
    """Builds the report of the medians of the rounds."""
    median = {name: statistics.median(values) for name, values in found.items()}
    limit = LIMIT_US if count == max(FOLLOWERS) else None
    measures = [
        Measure("CPU of the leader, a step", median["cpu"], "µs"),
        Measure("  a follower", median["cpu"] / count, "µs"),
        Measure(f"  a lane's layer of {LAYERS}", median["cpu"] / LAYERS, "µs", limit),
        Measure("  of it on the calling thread", median["thread"], "µs"),
        Measure("CPU of the busiest follower, a step", median["busiest"], "µs"),
        Measure("CPU of the mean follower, a step", median["mean"], "µs"),
        Measure("until the last follower has it", median["latency"] / 1000, "ms"),
    ]
    title = f"plans of {ROWS} rows to {count} processes that follow, {HOST} a host"
    return Part(f"{count}", title, measures, details=found)


def _rounds(leader: MeasuredLeader, rounds: int, steps: int) -> dict[str, list[float]]:
    """Microseconds of a step in each round, by name. Plans are sent at a steady pace."""
    found: dict[str, list[float]] = {}
    idle = _cpu_of_nothing()
    for turn in range(-1, rounds):  # the first one is for warming up
        plans = [plan((turn + 1) * steps + step) for step in range(steps)]
        boundaries = [Boundary(one.number, [one], shapes_digest("", [one])) for one in plans]
        before, sent, thread = _seen(leader), [], 0.0
        began, cpu = time.monotonic(), time.process_time()
        for boundary in boundaries:
            sent.append(time.monotonic())
            entered = time.thread_time()
            leader.broadcast(boundary)
            thread += time.thread_time() - entered
            time.sleep(STEP_SECONDS)
        leader.settle()
        cpu = time.process_time() - cpu - idle * (time.monotonic() - began)
        after = _seen(leader)
        own = [late.cpu - early.cpu for early, late in zip(before, after, strict=True)]
        last = [max(times) for times in zip(*(each.times for each in after), strict=True)]
        latency = statistics.median(there - gone for there, gone in zip(last, sent, strict=True))
        values = {"cpu": cpu / steps, "thread": thread / steps, "latency": latency}
        values |= {"busiest": max(own) / steps, "mean": statistics.mean(own) / steps}
        for name, value in values.items() if turn >= 0 else ():
            found.setdefault(name, []).append(1e6 * value)
    return found


def _cpu_of_nothing() -> float:
    """CPU seconds of this process in a second without plans."""
    began, cpu = time.monotonic(), time.process_time()
    time.sleep(2.0)
    return (time.process_time() - cpu) / (time.monotonic() - began)


def _seen(leader: Leader) -> list[Seen]:
    """Records of all followers since the last call."""
    answers = leader.collect("seen", 60.0).values()
    return [msgspec.msgpack.decode(data, type=Seen) for data in answers]


def follow(address: str, processes: int, process: int) -> None:
    """A follower that ignores its plans, until the leader leaves."""
    follower = Follower(
        _identity(process, processes), address=address, token=_TOKEN, cluster=_CLUSTER
    )
    times: list[float] = []

    def seen() -> bytes:
        found, times[:] = [*times], []
        return msgspec.msgpack.encode(Seen(found, time.process_time()))

    follower.answer("seen", seen)
    follower.register()
    follower.ready()
    for boundary in follower.boundaries():
        times.append(time.monotonic())
        follower.completed(boundary.number)
    follower.close()
