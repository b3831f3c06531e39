"""Host time of the link inside one runtime, against the devices of both sides (part e).

A message of one row a device goes there and an answer comes back, on simulated devices: first in
one process, which owns both sides, then in processes of one role with eight to one devices each:
TPU hosts have eight or four, Slurm and `--host-processes` give each GPU a process; then calls that
take a shard a device, among them the cheapest there is, and what a link of one piece would take. As
in a step, messages follow each other layer by layer: what comes after a sleep costs several times
as much, whatever it is. The clock is the CPU time of the thread that enqueues; that of the
process's other threads, which copy for the simulated devices and over sockets between processes,
is told apart. Between processes, messages of one device to one take turns with those of all: the
more threads a process of simulated devices has, the more any call costs.

Run by `pipeline.py` as workers: `python -m jaxserve.bench.link --result FILE`.
"""

import argparse
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxserve.bench.report import Measure, Part
from jaxserve.bench.workers import Worker, barrier, run_worker, run_workers, writing
from jaxserve.config.deployment import AttentionRole, Deployment, FFNRole
from jaxserve.fleet.arguments import ProcessArguments
from jaxserve.fleet.devices import initialise
from jaxserve.link.dispatch.copy import fast_copy, fast_first, fast_shards
from jaxserve.link.dispatch.ends import Arrays, piece_sharding
from jaxserve.link.dispatch.route import Route
from jaxserve.link.dispatch.transport import Transport
from jaxserve.link.runtime_link import TRANSPORTS
from jaxserve.mesh import Submeshes
from jaxserve.ports import free_port
from jaxserve.roles.compilation import hot_call

SIDES = [(1, 1), (1, 16), (16, 1), (4, 4), (8, 8), (16, 16), (8, 24), (24, 8), (32, 32)]
MOST = (16, 16)
MOST_QUICK = (8, 8)
HOST_DEVICES = (8, 4, 2, 1)
"""Of a process of one role."""
ALL, ONE = "all", "one"
"""Messages between all devices of both roles, and between the first of each."""
DIRECTIONS = ("dispatch", "combine")
ROWS = 512
"""Rows of a piece, where the effect of its bytes is measured."""
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
    most = MOST_QUICK if quick else MOST
    one = over_hosts(1, 1, 1, arguments)
    hosts = {devices: over_hosts(*most, devices, arguments) for devices in HOST_DEVICES}
    many_rows = over_hosts(*most, HOST_DEVICES[0], [*arguments, "--rows", f"{ROWS}"])
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
    name = f"{most[0]}A{most[1]}F"
    base = worst(one)
    measures.append(Measure("device_put, a process a role: 1A1F", base, "µs"))
    for devices, rows in hosts.items():
        least = max(row[ALL]["both"] / row[ONE]["both"] for row in rows if ONE in row)
        measures += [
            Measure(f"device_put, {devices} devices a process: {name}", worst(rows), "µs"),
            Measure("  of it in the kernel", max(row[ALL]["kernel"] for row in rows), "µs"),
            Measure("  of the process's other threads", _rest(rows), "µs"),
            Measure(f"  {name} ÷ 1A1F of the same processes", least, "", LIMIT),
            Measure(f"  {name} ÷ 1A1F", worst(rows) / base, "", LIMIT),
        ]
    alone = statistics.median(row[ALL]["both"] for row in hosts[1])
    measures += [
        Measure(f"  {name} ÷ 1A1F, median process", alone / base, ""),
        Measure(
            f"device_put, {HOST_DEVICES[0]} devices a process, {ROWS} rows a device: {name}",
            worst(many_rows),
            "µs",
        ),
        Measure("  of the process's other threads", _rest(many_rows), "µs"),
    ]
    for name, times in calls.items():
        for devices, microseconds in times.items():
            measures.append(Measure(f"{name}, {devices} devices", microseconds, "µs"))
    notes = [
        "Medians. In the first rows one process owns all devices, so both sides' shares of the "
        "host time are in it.",
        "So many devices a process: each has one role; the process that spends most, which is also "
        "what ratios are of.",
        "Between processes of CPU devices JAX copies over sockets, by its transfer server.",
        "Routes trampoline and broadcast are one wire: rows cross once, the ffn mesh spreads them.",
        "One piece: the first shard, its copy, and an array put together of it and of padding; the "
        "collectives that bring rows together and spread them come on top.",
    ]
    details = found | {"hosts": hosts, "1A1F": one, "many rows": many_rows, "calls": calls}
    return Part("link", "(e) host time of a message and its answer", measures, notes, details)


Times = dict[str, dict[str, float]]
"""What `_times` measures, by the name of the messages."""


def worst(rows: list[Times]) -> float:
    """Of the process that spends most."""
    return max(row[ALL]["both"] for row in rows)


def _rest(rows: list[Times]) -> float:
    return max(row[ALL]["rest"] for row in rows)


def over_hosts(attention: int, ffn: int, devices: int, arguments: list[str]) -> list[Times]:
    """Times that each process spends on its own ends of a message and its answer.

    Processes have at most `devices` devices each. `ALL` counts every end. `ONE` counts those
    between the first attention device and the first ffn device, in processes that own one.
    """
    processes = -(-attention // devices) + -(-ffn // devices)
    shared = [*arguments, "--attention", str(attention), "--ffn", str(ffn)]
    shared += ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", str(processes)]
    workers = [
        Worker("jaxserve.bench.link", [*shared, "--process", str(process)], {})
        for process in range(processes)
    ]
    return run_workers(workers, _SECONDS)


def compare(rounds: int) -> dict[str, Any]:
    """Microseconds of every transport and pair of sides."""
    devices = np.array(jax.devices())
    found: dict[str, Any] = {}
    for transport in TRANSPORTS:
        found[transport] = {}
        for attention, ffn in SIDES:
            a = Mesh(devices[:attention].reshape(-1, 1), ("dp", "tp"))
            f = Mesh(devices[attention : attention + ffn].reshape(-1, 1), ("ep", "tp"))
            times = _times(transport, {ALL: (a, f)}, rounds, 1)[ALL]
            times["a device"] = times["both"] / max(attention, ffn)
            found[transport][f"{attention}A{ffn}F"] = times
    return found


def time_calls(rounds: int) -> dict[str, dict[int, float]]:
    """Microseconds of calls in a row, by the devices of one side."""
    devices, spec = np.array(jax.devices()), PartitionSpec("x")
    make_copy, first_of, (shards_of, make_assemble) = fast_copy(), fast_first(), fast_shards()
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
            return assemble([*copy([first_of(array)]), *padding[1:]])

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


def on_host(options: argparse.Namespace) -> Times:
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
    a, f = meshes.attention, meshes.ffn
    cases = {ALL: (a, f), ONE: (_first(a), _first(f))}
    here = {name: ends for name, ends in cases.items() if any(end.local_devices for end in ends)}
    times = _times("device_put", here, options.rounds, options.rows)
    barrier("measured")
    if options.process == 0:
        time.sleep(_LEADER_STAYS_SECONDS)
    jax.distributed.shutdown()
    return times


def _first(mesh: Mesh) -> Mesh:
    return Mesh(mesh.devices[:1, :1], mesh.axis_names)


class _Way(NamedTuple):
    """One direction of a link."""

    case: str
    name: str
    transport: Transport
    send: Callable[..., object]
    receive: Callable[[], Arrays]
    anew: Callable[[], Sequence[jax.Array]]
    """Makes a message."""


def _times(transport: str, cases: dict[str, tuple[Mesh, Mesh]], rounds: int, rows: int) -> Times:
    """For messages between each of these pairs of meshes, which take turns, microseconds of this
    thread's CPU time a message (dispatch), its answer (combine) and both; of both what it spent in
    the kernel, and the CPU time of the process's other threads until all has arrived. Medians, but
    for the kernel's, which is counted in ticks."""
    ways = [way for case, ends in cases.items() for way in _both_ways(transport, case, *ends, rows)]
    samples: dict[tuple[str, str], list[float]] = {(way.case, way.name): [] for way in ways}
    rests: dict[tuple[str, str], list[float]] = {(way.case, way.name): [] for way in ways}
    kernels = dict.fromkeys(cases, 0.0)
    for number in range(-3, rounds):
        for case, name, way, send, receive, anew in ways:
            sent = jax.block_until_ready([anew() for _ in range(LAYERS)])
            arrived: list[Arrays] = []
            process, kernel = time.process_time(), _kernel_seconds()
            start = time.thread_time()
            for arrays in sent:
                if way.source.local_devices:
                    send(*arrays)
                if way.destination.local_devices:
                    arrived.append(receive())
            spent = time.thread_time() - start
            kernel = _kernel_seconds() - kernel
            waited = time.thread_time()
            jax.block_until_ready(arrived)
            rest = time.process_time() - process - spent - (time.thread_time() - waited)
            if number >= 0:
                samples[case, name].append(spent / LAYERS * 1e6)
                rests[case, name].append(rest / LAYERS * 1e6)
                kernels[case] += kernel / LAYERS / rounds * 1e6
    found = {}
    for case in cases:
        found[case] = {name: statistics.median(samples[case, name]) for name in DIRECTIONS}
        found[case] |= {
            "both": sum(found[case].values()),
            "kernel": kernels[case],
            "rest": sum(statistics.median(rests[case, name]) for name in DIRECTIONS),
        }
    return found


def _both_ways(transport: str, case: str, a: Mesh, f: Mesh, rows: int) -> list[_Way]:
    cls, route, piece = TRANSPORTS[transport], Route(a.size, f.size), (rows, WIDTH)
    dispatch = cls("dispatch", route, a, f, piece, jnp.dtype(jnp.uint8))
    combine = cls("combine", route, a, f, piece, jnp.dtype(jnp.bfloat16))
    message = [_zeros(a, jnp.dtype(jnp.uint8), rows)]
    answer = [_zeros(f, jnp.dtype(jnp.bfloat16), rows) for _ in range(route.slots)]
    return [
        _Way(case, name, way, way.sender(), way.receiver(), _anew(way, arrays))
        for name, way, arrays in zip(
            DIRECTIONS, (dispatch, combine), (message, answer), strict=True
        )
    ]


def _kernel_seconds() -> float:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_stime


def _anew(way: Transport, arrays: list[jax.Array]) -> Callable[[], Sequence[jax.Array]]:
    """Makes what a program would: JAX keeps what was once asked of an array."""
    if not way.source.local_devices:
        return lambda: ()
    compute = hot_call(jax.jit(lambda *arrays: [-x for x in arrays]).lower(*arrays).compile())
    return lambda: compute(*arrays)


def _zeros(mesh: Mesh, dtype: jnp.dtype, rows: int) -> jax.Array:
    """So many rows on each device of a mesh that other processes may own."""
    zeros = np.zeros((rows, WIDTH), dtype)
    return jax.make_array_from_callback(
        (mesh.size * rows, WIDTH), piece_sharding(mesh), lambda _: zeros, dtype=dtype
    )


def main() -> None:
    """The worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--rows", type=int, default=1)
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
