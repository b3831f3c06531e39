"""Host time of the link inside one runtime, against the devices of both sides (part e).

A message of one row a device goes there and an answer comes back, on simulated devices: first in
one process, which owns both sides, then on hosts of up to eight devices, a process each, then with
a process a device, as Slurm and `--host-processes` start them on GPUs; then calls that take a shard
a device, among them the cheapest there is, and what a link of one piece would take. As in a step,
messages follow each other layer by layer: what comes after a sleep costs several times as much,
whatever it is. The clock is the enqueuing thread's CPU time: simulated devices copy on threads of
the same cores.

Run by `pipeline.py` as workers: `python -m jaxserve.bench.link --result FILE`.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxserve.bench.report import Measure, Part
from jaxserve.bench.workers import Worker, barrier, run_worker, run_workers, writing
from jaxserve.config.deployment import AttentionRole, Deployment, FFNRole
from jaxserve.fleet.addresses import free_port
from jaxserve.fleet.arguments import ProcessArguments
from jaxserve.fleet.bootstrap import initialise
from jaxserve.link.copy import fast_copy, fast_shards
from jaxserve.link.ends import Arrays, piece_sharding
from jaxserve.link.route import Route
from jaxserve.link.runtime_link import TRANSPORTS
from jaxserve.link.transport import Transport
from jaxserve.mesh import Submeshes
from jaxserve.roles.compilation import hot_call

SIDES = [(1, 1), (1, 16), (16, 1), (4, 4), (8, 8), (16, 16), (8, 24), (24, 8), (32, 32)]
HOSTS = [(1, 1), (8, 8), (16, 16)]
HOST_DEVICES = 8
LAYERS = 16
"""Messages in a row; the CPU backend allows 32 in flight on a device."""
WIDTH = 128
_SECONDS, _LEADER_STAYS_SECONDS = 600.0, 3.0
CALLS = (1, 8, 16)
"""Devices that single calls are timed for."""
LIMIT = 2.0
"""Of a message between one and 16 devices over one between one and one."""


def measure(quick: bool) -> Part:
    """Runs the worker and puts its numbers into words; starts no JAX in this process."""
    arguments = ["--rounds", "20" if quick else "200"]
    worker = Worker("jaxserve.bench.link", arguments, {"JAX_NUM_CPU_DEVICES": "64"})
    found = run_worker(worker, _SECONDS)
    calls = found.pop("calls")
    hosts = {
        f"{attention}A{ffn}F": over_hosts(attention, ffn, HOST_DEVICES, arguments)
        for attention, ffn in HOSTS
    }
    most = HOSTS[1 if quick else 2]
    alone = over_hosts(*most, 1, arguments)
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
    for name, row in hosts.items():
        measures.append(Measure(f"device_put, hosts of 8: {name}", max(row), "µs"))
    measures.append(
        Measure("  16A16F ÷ 1A1F", max(hosts["16A16F"]) / max(hosts["1A1F"]), "", LIMIT)
    )
    name = f"{most[0]}A{most[1]}F"
    measures += [
        Measure(f"device_put, a process a device: {name}, median", statistics.median(alone), "µs"),
        Measure(f"  {name} ÷ 1A1F", max(alone) / max(hosts["1A1F"]), "", LIMIT),
    ]
    for name, times in calls.items():
        for devices, microseconds in times.items():
            measures.append(Measure(f"{name}, {devices} devices", microseconds, "µs"))
    notes = [
        "Medians. In the first rows one process owns all devices, so both sides' shares of the "
        "host time are in it.",
        f"Hosts of {HOST_DEVICES}: a process a host, each of one role; the process that spends "
        "most, which is also what ratios are of.",
        "Routes trampoline and broadcast are one wire: rows cross once, the ffn mesh spreads them.",
        "One piece: the first shard, its copy, and an array put together of it and of padding; the "
        "collectives that bring rows together and spread them come on top.",
    ]
    details = found | {"hosts": hosts, "a process a device": alone, "calls": calls}
    return Part("link", "(e) host time of a message and its answer", measures, notes, details)


def over_hosts(attention: int, ffn: int, devices: int, arguments: list[str]) -> list[float]:
    """Microseconds that each process, of so many devices at most, spends on a message and its
    answer, its own end of both."""
    processes = -(-attention // devices) + -(-ffn // devices)
    shared = [*arguments, "--attention", str(attention), "--ffn", str(ffn)]
    shared += ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", str(processes)]
    workers = [
        Worker("jaxserve.bench.link", [*shared, "--process", str(process)], {})
        for process in range(processes)
    ]
    return [sum(found.values()) for found in run_workers(workers, _SECONDS)]


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


def time_calls(rounds: int) -> dict[str, dict[int, float]]:
    """Microseconds of calls in a row, by the devices of one side."""
    devices, spec = np.array(jax.devices()), PartitionSpec("x")
    make_copy, (shards_of, make_assemble) = fast_copy(), fast_shards()
    found: dict[str, dict[int, float]] = {}
    for count in CALLS:
        sides = np.split(devices[: 2 * count], 2)
        here, there = (NamedSharding(Mesh(side, ("x",)), spec) for side in sides)
        shape, dtype = (count, WIDTH), jnp.dtype(jnp.uint8)
        compute = jax.jit(jnp.negative, out_shardings=here)
        copy, assemble = make_copy(there), make_assemble(shape, dtype, there)
        copy_one = make_copy(SingleDeviceSharding(sides[1][0]))
        zeros = jax.device_put(np.zeros(shape, dtype), here)
        padding = shards_of(jax.device_put(zeros, there))
        nothing = hot_call(jax.jit(lambda x: x).lower(zeros).compile())

        def whole(array: Any, copy: Callable[..., Any] = copy) -> Any:
            return copy([array])

        def one_piece(
            array: Any,
            copy: Callable[..., Any] = copy_one,
            assemble: Callable[..., Any] = assemble,
            padding: Sequence[jax.Array] = padding,
        ) -> jax.Array:
            first = array._fully_replicated_shard()  # of any array: JAX's cheapest way to a shard
            return assemble([*copy([first]), *padding[1:]])

        calls: dict[str, Callable[[Any], Any]] = {
            "a program that does nothing": nothing,
            "a copy": whole,
            "one piece": one_piece,
        }
        samples: dict[str, list[float]] = {}
        for number in range(-3, rounds):
            for name, call in calls.items():
                new = jax.block_until_ready([compute(zeros) for _ in range(LAYERS)])
                spent = _timed(call, new)
                if number >= 0:
                    samples.setdefault(name, []).append(spent * 1e6)
        for name, values in samples.items():
            found.setdefault(name, {})[count] = statistics.median(values)
    return found


def _timed(call: Callable[[Any], Any], arguments: Sequence[Any]) -> float:
    """CPU seconds of a call, one after the other; waits for what they compute."""
    start = time.thread_time()
    results = [call(argument) for argument in arguments]
    spent = (time.thread_time() - start) / len(arguments)
    jax.block_until_ready(results)
    return spent


def on_host(options: argparse.Namespace) -> dict[str, float]:
    """One host's part of a deployment, in the order that all take."""
    settings = Deployment(
        model="",
        attention=AttentionRole(dp=options.attention),
        ffn=FFNRole(ep=options.ffn),
    )
    initialise(
        ProcessArguments(
            process_id=options.process,
            processes=options.processes,
            coordinator=options.coordinator,
        ),
        settings,
    )
    meshes = Submeshes(settings)
    route = Route(options.attention, options.ffn)
    times = _times("device_put", route, meshes.attention, meshes.ffn, options.rounds)
    barrier("measured")
    if options.process == 0:
        time.sleep(_LEADER_STAYS_SECONDS)
    jax.distributed.shutdown()
    return {name: times[name] for name in ("dispatch", "combine")}


def _times(transport: str, route: Route, a: Mesh, f: Mesh, rounds: int) -> dict[str, float]:
    cls, piece = TRANSPORTS[transport], (1, WIDTH)
    dispatch = cls("dispatch", route, a, f, piece, jnp.dtype(jnp.uint8))
    combine = cls("combine", route, a, f, piece, jnp.dtype(jnp.bfloat16))
    message = [_zeros(a, jnp.dtype(jnp.uint8))]
    answer = [_zeros(f, jnp.dtype(jnp.bfloat16)) for _ in range(route.slots)]
    ways = [
        (name, way, way.sender(), way.receiver(), _anew(way, arrays))
        for name, way, arrays in (("dispatch", dispatch, message), ("combine", combine, answer))
    ]
    samples: dict[str, list[float]] = {"dispatch": [], "combine": []}
    for number in range(-3, rounds):
        for name, way, send, receive, anew in ways:
            sent = jax.block_until_ready([anew() for _ in range(LAYERS)])
            arrived: list[Arrays] = []
            start = time.thread_time()
            for arrays in sent:
                if way.source.local_devices:
                    send(*arrays)
                if way.destination.local_devices:
                    arrived.append(receive())
            spent = time.thread_time() - start
            jax.block_until_ready(arrived)
            if number >= 0:
                samples[name].append(spent / LAYERS * 1e6)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    return medians | {"both": sum(medians.values())}


def _anew(way: Transport, arrays: list[jax.Array]) -> Callable[[], Sequence[jax.Array]]:
    """Makes what a program would: JAX keeps what was once asked of an array."""
    if not way.source.local_devices:
        return lambda: ()
    compute = hot_call(jax.jit(lambda *arrays: [-x for x in arrays]).lower(*arrays).compile())
    return lambda: compute(*arrays)


def _zeros(mesh: Mesh, dtype: jnp.dtype) -> jax.Array:
    """A row on each device of a mesh that other processes may own."""
    zeros = np.zeros((1, WIDTH), dtype)
    return jax.make_array_from_callback(
        (mesh.size, WIDTH), piece_sharding(mesh), lambda _: zeros, dtype=dtype
    )


def main() -> None:
    """The worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--result", required=True)
    parser.add_argument("--attention", type=int, default=0)
    parser.add_argument("--ffn", type=int, default=0)
    parser.add_argument("--coordinator", default="")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, default=0)
    options = parser.parse_args()
    with writing(options.result) as result:
        if options.attention:
            result |= on_host(options)
        else:
            result |= compare(options.rounds) | {"calls": time_calls(options.rounds)}


if __name__ == "__main__":
    main()
