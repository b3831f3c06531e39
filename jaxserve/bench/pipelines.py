"""Parts of `bench pipeline` about steps in two processes: throughput of three lanes against one,
and host time.

Throughput: attention and FFN in a process and on a core each, with a random model whose stages take
equally long; one process finds that width first. One lane leaves each core idle half of the time,
three lanes hide all but the cost of link and hosts. The processes run the same plans without a
control plane, in the engine's order: a lane's next step begins at once, and its tokens are read one
step late.

Host time of a step of 61 layers and three lanes, of a tiny random model: with `pipeline: layer` the
host makes a call a stage, layer and lane, with `pipeline: step` one for all. The pipelines take
turns in one process, and in two with a role each. The measure is the core time of the enqueuing
thread, without waits and other threads, with the embedding, head and sampler of all lanes. Steps
bring neither a sequence nor a page, as most steps of a server do.
"""

import functools
import math
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import msgspec

from jaxserve.bench.random_model import build_driver, decode_plan, deployment_of, model_config
from jaxserve.bench.report import Measure, Part, take_turns
from jaxserve.bench.stages import run_steps
from jaxserve.bench.workers import (
    Task,
    leave_runtime,
    run_worker,
    run_workers,
    two_cores,
    wait_until,
)
from jaxserve.checkpoint.random_leaves import RandomLeaves
from jaxserve.checkpoint.step3 import step3_names
from jaxserve.config.deployment import Deployment
from jaxserve.config.model import FFN, ModelConfig, RouterSpec
from jaxserve.config.topology import TRANSPORTS, Role
from jaxserve.fleet.arguments import ProcessArguments
from jaxserve.fleet.attention_runtime import attention_cell
from jaxserve.fleet.devices import initialise
from jaxserve.fleet.ffn_runtime import message_server
from jaxserve.fleet.role_runtime import RoleRuntime
from jaxserve.ports import free_port
from jaxserve.roles.attention import Cell

LAYERS = 8
ROWS = 32
"""Sequences of a lane, each with one token to decode."""
CONTEXT = 512
"""Tokens that every sequence attends to, enough for an attend of 2 ms and more."""
LANES = (1, 2, 3)
WIDTH = 512
"""Width of the shared expert that calibration starts from."""
WIDTHS = 4
"""Widths that calibration tries at most."""
LIMITS = {False: 1.7, True: 1.4}
"""Least gain of three lanes over one: inside a runtime (False), and between runtimes (True)."""
_CALIBRATE_SECONDS, _RUN_SECONDS = 900.0, 900.0


def measure_overlap(quick: bool) -> Iterator[Part]:
    """Calibrates and runs all transports; starts no JAX in this process."""
    cores = two_cores("overlap")
    steps = {"steps": 2 if quick else 6}
    stages = run_worker(Task(calibrate, steps, 2, cores[0]), _CALIBRATE_SECONDS)
    found: dict[str, list[Any]] = {}
    for transport in TRANSPORTS:
        shared = {"width": stages["width"], "transport": transport}
        shared |= {"steps": 3 if quick else 6, "rounds": 2 if quick else 8}
        shared["address"] = f"127.0.0.1:{free_port()}"
        way = run_apart if TRANSPORTS[transport].crosses_runtimes else run_joined
        workers = [Task(way, {**shared, "process": n}, core=core) for n, core in enumerate(cores)]
        found[transport] = run_workers(workers, _RUN_SECONDS)
    yield report(stages, found)


def report(stages: dict[str, Any], found: dict[str, list[Any]]) -> Part:
    """Builds the report. `found` has the results of both processes by transport."""
    attend, ffn = stages["attend_ms"], stages["ffn_ms"]
    measures = []
    for transport, (attention_side, ffn_side) in found.items():
        layer = {lanes: attention_side[str(lanes)]["layer_ms"] for lanes in LANES}
        link = max(0.0, layer[1] - attend - ffn)
        ideal = ideal_gains(attend, ffn, link)
        for lanes in (3, 2):
            gain = layer[1] / layer[lanes]
            limit = LIMITS[TRANSPORTS[transport].crosses_runtimes] if lanes == 3 else None
            measures += [
                Measure(f"{transport}: {lanes} lanes ÷ 1 lane", gain, "", limit, "more"),
                Measure(f"  share of the ideal, {ideal[lanes]:.2f}", gain / ideal[lanes]),
            ]
        measures += [
            Measure("  one lane, a layer", layer[1], "ms"),
            Measure("  of it neither attend nor ffn", link, "ms"),
            Measure("  3 lanes, a layer of one lane", layer[3], "ms"),
            Measure("  core time of it, attention", attention_side["3"]["core_ms"], "ms"),
        ]
        if "3" in ffn_side:
            measures.append(Measure("  core time of it, ffn", ffn_side["3"]["core_ms"], "ms"))
    measures += [Measure("attend alone", attend, "ms"), Measure("ffn alone", ffn, "ms")]
    notes = [
        f"{ROWS} decode tokens a lane, {CONTEXT} tokens of context, {LAYERS} MoE layers, FP32.",
        "The best of several rounds each: what else runs on a core only makes a round longer.",
        "Ideal: cycle max(t_a, t_f, t_link) with 3 lanes, max(t_a, t_f) + t_link / 2 with 2.",
        "Core time above attend or ffn alone is what host and link cost that core.",
    ]
    title = "throughput of lanes, two processes of one core each"
    return Part("overlap", title, measures, notes, {"stages": stages, "runs": found})


def ideal_gains(attend: float, ffn: float, link: float) -> dict[int, float]:
    """Returns the throughput of 2 and of 3 lanes over that of one, by the cycle formulas of
    StepMesh and MegaScale-Infer.

    Args:
      attend, ffn, link: time of a layer's attend, ffn, and both crossings together.
    """
    serial = attend + ffn + link
    return {
        2: min(2.0, serial / (max(attend, ffn) + link / 2)),
        3: min(3.0, serial / max(attend, ffn, link)),
    }


def balanced_config(width: int) -> ModelConfig:
    """Describes MoE layers whose shared expert has this width."""
    moe = FFN(router=RouterSpec(experts=8, top_k=2), expert_d_ff=64, d_ff=width)
    return model_config(LAYERS, (8, 64, 256), moe, d_model=256, positions=CONTEXT)


def deployment(lanes: int, transport: str, address: str = "") -> Deployment:
    """Describes 1A1F; over `pull` the ffn worker is at the address."""
    settings: dict[str, Any] = {"lanes": lanes, "link.transport": transport}
    if TRANSPORTS[transport].crosses_runtimes:
        settings |= {"ffn.runtime": "ffn", "link.addresses": [address]}
    return deployment_of(slots=ROWS, max_length=CONTEXT, page_size=16, **settings)


def calibrate(steps: int) -> dict[str, Any]:
    """Finds the width at which attend and ffn take equally long, both alone in this process. The
    time of an ffn is nearly proportional to its width."""
    found, width = dict[int, tuple[float, float]](), WIDTH
    while width not in found and len(found) < WIDTHS:
        attend, ffn = found[width] = stage_ms(width, steps)
        width = max(16, round(width * attend / ffn / 16) * 16)  # vector registers have 16 floats
    width = min(found, key=lambda width: abs(math.log(found[width][0] / found[width][1])))
    attend, ffn = found[width]
    return {"width": width, "attend_ms": attend, "ffn_ms": ffn, "tried": found}


def stage_ms(width: int, steps: int) -> tuple[float, float]:
    """Returns the median core time of an attend and of an ffn with this width, in milliseconds."""
    settings = deployment(1, "auto")
    driver = build_driver(settings, balanced_config(width))
    run_lanes(settings, driver, 1, 1)  # warms up
    driver.observer = alone = _Alone()
    run_lanes(settings, driver, 1, steps)
    attend, ffn = (statistics.median(alone.ms[stage]) for stage in ("attend", "ffn"))
    return attend, ffn


class _Alone:
    """Observer that waits for each stage before the next one is enqueued, so that the core time of
    the process tells them apart. Keeps the milliseconds of every stage in `ms`, by its name."""

    def __init__(self) -> None:
        self.ms: dict[str, list[float]] = {}
        self._last = time.process_time()

    def observe(self, stage: str, lane: int, layer: int, step: int, *result: Any) -> None:
        """Waits for a stage. The end of a step, after the last layer, does not count."""
        jax.block_until_ready(result[0])
        last, self._last = self._last, time.process_time()
        if layer < LAYERS:
            self.ms.setdefault(stage, []).append((self._last - last) * 1e3)

    def seen(self, lane: int, result: Any) -> None:
        """Does nothing: the result was waited for."""


def run_lanes(settings: Deployment, driver: Cell, lanes: int, steps: int) -> tuple[float, float]:
    """Runs `steps` steps on each of the first `lanes` lanes, in the order of the engine's loop.
    Returns milliseconds of a layer and lane: by the clock, and core time of this process."""
    plans = [decode_plan(settings, lane, CONTEXT) for _ in range(steps) for lane in range(lanes)]
    wall, core = time.perf_counter(), time.process_time()
    run_steps(driver, plans)
    layers = len(plans) * LAYERS / 1e3
    return (time.perf_counter() - wall) / layers, (time.process_time() - core) / layers


def run_apart(
    process: int, width: int, transport: str, address: str, steps: int, rounds: int
) -> dict[str, Any]:
    """Runs one of two runtimes: attention measures, and ffn answers until attention leaves."""
    token, settings = "bench", deployment(max(LANES), transport, address)
    config = balanced_config(width)
    role: Role = "ffn" if process else "attention"
    initialise(ProcessArguments(role=role, token=token), settings)
    runtime = RoleRuntime.of(config, step3_names(config), settings, role)
    if role == "ffn":
        server, _ = message_server(runtime, settings, RandomLeaves(), token, address)
        server.start()
        wait_until(lambda: server.domains, _RUN_SECONDS, "the attention worker")
        wait_until(lambda: not server.domains, _RUN_SECONDS, "its end")
        server.close()
        return {}
    driver, client = attention_cell(runtime, settings, RandomLeaves(), token)
    measured = measure_lanes(settings, driver, steps, rounds)
    client.close()
    return measured


def run_joined(
    process: int, width: int, transport: str, address: str, steps: int, rounds: int
) -> dict[str, Any]:
    """Runs one of two processes of a runtime whose coordinator is at the address."""
    settings = deployment(max(LANES), transport)
    initialise(ProcessArguments(process_id=process, processes=2, coordinator=address), settings)
    driver = build_driver(settings, balanced_config(width))
    measured = measure_lanes(settings, driver, steps, rounds)
    leave_runtime(process)
    return measured


def measure_lanes(settings: Deployment, driver: Cell, steps: int, rounds: int) -> dict[str, Any]:
    """Measures all numbers of lanes in turns, in the same order in both processes."""
    ways = {
        f"{lanes}": functools.partial(run_lanes, settings, driver, lanes, steps) for lanes in LANES
    }
    found = {}
    for lanes, windows in take_turns(ways, rounds).items():
        wall, core = zip(*windows, strict=True)
        found[lanes] = {"layer_ms": min(wall), "core_ms": statistics.median(core), "rounds": wall}
    return found


STEP_LAYERS, STEP_LANES, KV_LENGTH = 61, 3, 3
"""Step-3's layers and the paper's lanes."""
MOE = FFN(router=RouterSpec(experts=4, top_k=2), expert_d_ff=8, d_ff=8)
CONFIG = model_config(STEP_LAYERS, (2, 8, 8), MOE, d_model=16, positions=64)
PIPELINES = ("layer", "step")
LIMIT_MS = 1.0
"""Target of a whole step and role with `pipeline: step`."""
_HOST_SECONDS = 900.0


def measure_host(quick: bool) -> Iterator[Part]:
    """Measures in a process with a device of each role, and in two processes."""
    rounds = 3 if quick else 100
    found = {"both roles": run_worker(Task(enqueue, {"rounds": rounds}, devices=2), _HOST_SECONDS)}
    given = {"rounds": rounds, "address": f"127.0.0.1:{free_port()}"}
    pair = [Task(enqueue, given | {"process": process}) for process in (0, 1)]
    found |= zip(("attention", "ffn"), run_workers(pair, _HOST_SECONDS), strict=True)
    measures = []
    for roles, times in found.items():
        layer, step = (statistics.median(times[pipeline]) * 1e3 for pipeline in PIPELINES)
        both = roles == "both roles"
        limit = None if both else LIMIT_MS
        measures.append(Measure(f"{roles}: pipeline: step", step, "ms", limit))
        if both:
            measures.append(Measure("  half of it, for each role", step / 2, "ms", LIMIT_MS))
        measures.append(Measure("  pipeline: layer", layer, "ms"))
        measures.append(
            Measure("  a layer and lane of it", layer / STEP_LAYERS / STEP_LANES * 1e3, "µs")
        )
    notes = ["Medians of the enqueuing thread's core time, in one process and in two."]
    title = f"host time of a step of {STEP_LAYERS} layers and {STEP_LANES} lanes"
    yield Part("host", title, measures, notes, found)


def tiny_deployment(pipeline: str) -> Deployment:
    """Describes 1A1F with INT8 on the wire."""
    shared: dict[str, Any] = {"lanes": STEP_LANES, "link.dispatch": "int8", "pipeline": pipeline}
    return deployment_of(slots=4, max_length=32, page_size=16, **shared)


def enqueue(rounds: int, address: str = "", process: int = 0) -> dict[str, list[float]]:
    """Returns the core seconds of every step, by pipeline, after a tenth of the rounds as warm-up.
    The process has both roles or, with the address of a coordinator, a single one."""
    if address:
        joined = ProcessArguments(process_id=process, processes=2, coordinator=address)
        initialise(joined, tiny_deployment("layer"))
    ways = {}
    for pipeline in PIPELINES:
        made = tiny_deployment(pipeline)
        plans = [decode_plan(made, lane, KV_LENGTH) for lane in range(STEP_LANES)]
        driver = build_driver(made, CONFIG)
        _enqueue(driver, plans)
        later = [msgspec.structs.replace(plan, new_sequences=[], pages=b"") for plan in plans]
        ways[pipeline] = functools.partial(_enqueue, driver, later)
    found = take_turns(ways, rounds, warm_ups=rounds // 10 + 1)
    if address:
        leave_runtime(process)
    return found


def _enqueue(driver: Any, plans: list[Any]) -> float:
    """Returns this thread's core seconds for a step of each lane, after which devices are idle."""
    core = time.thread_time()
    for plan in plans:
        driver.begin(plan)
    made = [driver.advance() for _ in plans]
    core = time.thread_time() - core
    jax.block_until_ready([one.last for one in made])
    return core
