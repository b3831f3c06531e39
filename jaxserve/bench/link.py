"""Host time of the link inside one runtime, against the devices of both sides (part e).

A message of one row a device goes there and an answer comes back, on simulated devices in one
process, which owns both sides: a process of a deployment over several hosts pays for its own
devices alone. The clock is the enqueuing
thread's CPU time: simulated devices copy on threads of the same cores.

Run by `pipeline.py` as a worker: `python -m jaxserve.bench.link --result FILE`.
"""

import argparse
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxserve.bench.report import Measure, Part
from jaxserve.bench.workers import Worker, run_worker, writing
from jaxserve.link.route import Route
from jaxserve.link.runtime_link import TRANSPORTS
from jaxserve.link.transport import piece_sharding

SIDES = [(1, 1), (1, 16), (16, 1), (4, 4), (8, 8), (16, 16), (8, 24), (24, 8), (32, 32)]
WIDTH = 128
_SECONDS = 600.0
LIMIT = 2.0
"""Of a message between one and 16 devices over one between one and one."""


def measure(quick: bool) -> Part:
    """Runs the worker and puts its numbers into words; starts no JAX in this process."""
    arguments = ["--rounds", "20" if quick else "200"]
    worker = Worker("jaxserve.bench.link", arguments, {"JAX_NUM_CPU_DEVICES": "64"})
    found = run_worker(worker, _SECONDS)
    measures = []
    for transport, rows in found.items():
        for name, row in rows.items():
            measures.append(Measure(f"{transport}: {name}", row["both"], "µs"))
            measures.append(Measure("  of it dispatch", row["dispatch"], "µs"))
            measures.append(Measure("  a device of the larger side", row["a device"], "µs"))
    base = found["device_put"]["1A1F"]["both"]
    measures.append(
        Measure("device_put: 1A16F ÷ 1A1F", found["device_put"]["1A16F"]["both"] / base, "", LIMIT)
    )
    measures.append(
        Measure("device_put: 16A16F ÷ 1A1F", found["device_put"]["16A16F"]["both"] / base, "")
    )
    notes = [
        "Medians; one process owns all devices, so both sides' shares of the host time are in it.",
        "Routes trampoline and broadcast are one wire: rows cross once, the ffn mesh spreads them.",
    ]
    return Part("link", "(e) host time of a message and its answer", measures, notes, found)


def compare(rounds: int) -> dict[str, Any]:
    """Microseconds of every transport and pair of sides."""
    devices = np.array(jax.devices())
    found: dict[str, Any] = {}
    for transport in TRANSPORTS:
        found[transport] = {}
        for attention, ffn in SIDES:
            a = Mesh(devices[:attention].reshape(-1, 1), ("dp", "tp"))
            f = Mesh(devices[attention : attention + ffn].reshape(-1, 1), ("ep", "tp"))
            times = _times(transport, Route(attention, ffn), a, f, rounds)
            times["a device"] = times["both"] / max(attention, ffn)
            found[transport][f"{attention}A{ffn}F"] = times
    return found


def _times(transport: str, route: Route, a: Mesh, f: Mesh, rounds: int) -> dict[str, float]:
    cls, piece = TRANSPORTS[transport], (1, WIDTH)
    dispatch = cls("dispatch", route, a, f, piece, jnp.dtype(jnp.uint8))
    combine = cls("combine", route, a, f, piece, jnp.dtype(jnp.bfloat16))
    message = (jax.device_put(np.zeros((a.size, WIDTH), np.uint8), piece_sharding(a)),)
    answer = [
        jax.device_put(np.zeros((f.size, WIDTH), jnp.bfloat16), piece_sharding(f))
        for _ in range(route.slots)
    ]
    samples: dict[str, list[float]] = {"dispatch": [], "combine": []}
    for number in range(-3, rounds):
        for name, way, arrays in (("dispatch", dispatch, message), ("combine", combine, answer)):
            start = time.thread_time()
            way.send(arrays)
            arrived = way.receive()
            spent = time.thread_time() - start
            jax.block_until_ready(arrived)
            if number >= 0:
                samples[name].append(spent * 1e6)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    return medians | {"both": sum(medians.values())}


def main() -> None:
    """The worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--result", required=True)
    options = parser.parse_args()
    with writing(options.result) as result:
        result |= compare(options.rounds)


if __name__ == "__main__":
    main()
