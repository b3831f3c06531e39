"""`python -m jaxserve.bench plans`: the leader's CPU for a step's plan to processes that follow.

Followers are real processes over loopback that say they are on hosts of eight: 1, 7 and 31 of them.
Rounds take turns between two ways of sending the same plans: the tree of `fleet/broadcast.py`, and
a gRPC stream a follower, as every plan went before and as what is said to a single follower still
goes. Counted is the CPU of the whole process, threads of libraries included, without what it takes
when nothing is sent; and of followers that hand on. Latency is from the call until the last
follower has the plan decoded; it depends on the number of cores.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from jaxserve.bench.report import Measure, Part, run_parts
from jaxserve.bench.workers import BenchError
from jaxserve.config.deployment import Cluster
from jaxserve.errors import EngineFailedError
from jaxserve.fleet.control import Boundary, Identity, encode, shapes_digest
from jaxserve.fleet.follower import Follower
from jaxserve.fleet.leader import Leader
from jaxserve.roles.layout import Bucket
from jaxserve.roles.step_plan import StepPlan

FOLLOWERS = (1, 7, 31)
HOST = 8
"""Processes on one."""
ROWS = 2048
"""Sequences of a lane."""
STEP_SECONDS = 0.01
LAYERS = 61
LIMIT_US = 15.0
"""For a lane's layer, at 31 followers."""
WAYS = ("tree", "streams")
_TOKEN = "bench"
_CLUSTER = Cluster(start_seconds=300.0, step_seconds=120.0, heartbeat_seconds=20.0)


class Seen(msgspec.Struct):
    """Record of a follower: `time.monotonic` at the arrival of each boundary, and CPU seconds."""

    times: list[float]
    cpu: float


class Streams(Leader):
    """A leader that can also say to each what is for all."""

    def send(self, boundary: Boundary, way: str) -> None:
        """By the tree, or a stream each."""
        if way == "tree":
            self.broadcast(boundary)
            return
        self._next += 1
        data = encode(boundary)
        for follower in self._followers.values():
            follower.outbox.put(data)

    def settle(self) -> None:
        """Waits until all have done what was sent."""
        deadline = time.monotonic() + 60.0
        while any(each.completed < self._next - 1 for each in self._followers.values()):
            if time.monotonic() > deadline:
                raise BenchError(f"plans: followers are late: {self.describe()}")
            time.sleep(0.1)


def run(quick: bool, json_file: Path | None) -> int:
    """Measures all numbers of followers; 1 if the target is missed."""
    counts = FOLLOWERS[:2] if quick else FOLLOWERS
    parts = {f"{count}": partial(_measured, count) for count in counts}
    return run_parts("plans", parts, [*parts], quick, json_file)


def plan(number: int) -> StepPlan:
    """A decode step of `ROWS` sequences, of which every 128th gets a page."""
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


def _measured(count: int, quick: bool) -> Part:
    rounds, steps = (3, 20) if quick else (7, 100)
    failures: list[EngineFailedError] = []
    leader = Streams(
        _identity(0, count + 1),
        address="127.0.0.1:0",
        token=_TOKEN,
        cluster=_CLUSTER,
        on_failure=failures.append,
    )
    leader.start()
    arguments = [sys.executable, "-m", "jaxserve.bench.plans", leader.address, f"{count + 1}"]
    # Without a leader they end by themselves. gRPC would not bear a function before exec.
    numbers = range(1, count + 1)
    processes = [subprocess.Popen([*arguments, f"{number}"]) for number in numbers]
    try:
        leader.wait_ready(_CLUSTER.start_seconds)
        found = _rounds(leader, rounds, steps)
    finally:
        leader.close()
        for process in processes:
            process.wait(60.0)
    if failures:
        raise BenchError(f"plans: {failures[0]}")
    return part_of(count, found)


def part_of(count: int, found: dict[str, dict[str, list[float]]]) -> Part:
    """Medians of the rounds, in µs of a step."""
    median = {
        way: {name: statistics.median(values) for name, values in found[way].items()}
        for way in found
    }
    measures = []
    for way in WAYS:
        of_way = median[way]
        limit = LIMIT_US if way == "tree" and count == max(FOLLOWERS) else None
        measures += [
            Measure(f"{way}: CPU of the leader, a step", of_way["cpu"], "µs"),
            Measure("  a follower", of_way["cpu"] / count, "µs"),
            Measure(f"  a lane's layer of {LAYERS}", of_way["cpu"] / LAYERS, "µs", limit),
            Measure("  of it on the calling thread", of_way["thread"], "µs"),
            Measure("  CPU of the busiest follower, a step", of_way["busiest"], "µs"),
            Measure("  CPU of the mean follower, a step", of_way["mean"], "µs"),
            Measure("  until the last follower has it", of_way["latency"] / 1000, "ms"),
        ]
    title = f"plans of {ROWS} rows to {count} processes that follow, {HOST} a host"
    return Part(f"{count}", title, measures, details=found)


def _rounds(leader: Streams, rounds: int, steps: int) -> dict[str, dict[str, list[float]]]:
    """Of each way, µs of a step in each round."""
    names = "cpu", "thread", "busiest", "mean", "latency"
    found: dict[str, dict[str, list[float]]] = {way: {name: [] for name in names} for way in WAYS}
    number, idle = 0, _cpu_of_nothing()
    for turn in range(-1, rounds):  # the first one is for warming up
        for way in WAYS if turn % 2 else reversed(WAYS):
            plans = [plan(number + step) for step in range(steps)]
            boundaries = [Boundary(one.number, [one], shapes_digest("", [one])) for one in plans]
            number += steps
            before = _seen(leader)
            values = _round(leader, boundaries, way, idle)
            after = _seen(leader)
            own = [late.cpu - early.cpu for early, late in zip(before, after, strict=True)]
            last = [max(times) for times in zip(*(each.times for each in after), strict=True)]
            late = [there - gone for there, gone in zip(last, values.pop("sent"), strict=True)]
            values["latency"] = [statistics.median(late)]
            values |= {"busiest": [max(own) / steps], "mean": [statistics.mean(own) / steps]}
            if turn >= 0:
                for name, (value,) in values.items():
                    found[way][name].append(1e6 * value)
    return found


def _round(
    leader: Streams, boundaries: Sequence[Boundary], way: str, idle: float
) -> dict[str, list[float]]:
    """Sends them at a steady pace: CPU of a step, of the calling thread's too, and when each was
    sent. `idle` is the CPU of a second in which nothing is sent."""
    began, cpu, thread, sent = time.monotonic(), time.process_time(), 0.0, []
    for boundary in boundaries:
        sent.append(time.monotonic())
        entered = time.thread_time()
        leader.send(boundary, way)
        thread += time.thread_time() - entered
        time.sleep(STEP_SECONDS)
    leader.settle()
    cpu = time.process_time() - cpu - idle * (time.monotonic() - began)
    steps = len(boundaries)
    return {"cpu": [cpu / steps], "thread": [thread / steps], "sent": sent}


def _cpu_of_nothing() -> float:
    """Of this process, a second."""
    began, cpu = time.monotonic(), time.process_time()
    time.sleep(2.0)
    return (time.process_time() - cpu) / (time.monotonic() - began)


def _seen(leader: Leader) -> list[Seen]:
    """Of all followers, since the last time."""
    answers = leader.collect("seen", 60.0).values()
    return [msgspec.msgpack.decode(data, type=Seen) for data in answers]


def follow(address: str, processes: int, process: int) -> None:
    """A process that does nothing with the plans that it gets."""
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


def main(arguments: Sequence[str] | None = None) -> None:
    """One follower."""
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("processes", type=int)
    parser.add_argument("process", type=int)
    options = parser.parse_args(arguments)
    follow(options.address, options.processes, options.process)


if __name__ == "__main__":
    main()
