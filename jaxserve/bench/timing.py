"""Clocks of the benchmarks: core time of calls, and rounds in which several ways take turns."""

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


def take_turns[T](
    ways: Mapping[str, Callable[[], T]], rounds: int, warm_ups: int = 1
) -> dict[str, list[T]]:
    """Runs every way once a round, in an order drawn anew, so that other work on the machine
    affects all ways alike. Returns the results of the rounds after the first `warm_ups`."""
    draw, names = random.Random(0), list(ways)
    taken: dict[str, list[T]] = {name: [] for name in names}
    for number in range(-warm_ups, rounds):
        draw.shuffle(names)
        for name in names:
            result = ways[name]()
            if number >= 0:
                taken[name].append(result)
    return taken


def wall_seconds(call: Callable[[], Any]) -> float:
    """Seconds of a call, by the clock."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def core_seconds(call: Callable[[], Any], calls: int, warm_ups: int = 1) -> list[float]:
    """Core time of each call and of the arrays that it computes: its time on a core of its own,
    whatever else runs on the machine."""
    samples = []
    for _ in range(warm_ups + calls):
        start = time.process_time()
        jax.block_until_ready(call())
        samples.append(time.process_time() - start)
    return samples[warm_ups:]
