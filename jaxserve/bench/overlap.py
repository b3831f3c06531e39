"""Throughput of three lanes against one, in two processes of one core each (part b).

Attention lives in one process and FFN in the other, on a random model whose attend and ffn take
equally long: one lane leaves each core idle half of the time, three lanes hide all but what the
link and the hosts cost. The processes run the same plans without a control plane, in the engine's
order: a lane that has left begins its next step at once, and its tokens are read one step late.

Run by `pipeline.py` as workers: `calibrate` once, to find the width at which the stages balance,
then `run` twice, side by side.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxserve.bench.random_leaves import RandomLeaves
from jaxserve.bench.random_model import (
    RandomModel,
    bucket_of,
    build,
    build_local_cell,
    decode_plan,
    deployment_of,
    idle_experts,
    templates_of,
)
from jaxserve.bench.report import Measure, Part
from jaxserve.bench.workers import (
    BenchError,
    Worker,
    barrier,
    run_worker,
    run_workers,
    writing,
)
from jaxserve.checkpoint.step3 import step3_names
from jaxserve.config.deployment import Deployment
from jaxserve.config.model import FFN, MFA, ModelConfig, Rope, Router, decoder_layers
from jaxserve.config.topology import TRANSPORTS, Role
from jaxserve.fleet.arguments import ProcessArguments
from jaxserve.fleet.attention_runtime import attention_cell
from jaxserve.fleet.devices import initialise
from jaxserve.fleet.ffn_runtime import message_server
from jaxserve.fleet.role_runtime import RoleRuntime
from jaxserve.mesh import FFN_RULES, cached_sharding
from jaxserve.ports import free_port
from jaxserve.roles.cell import Cell
from jaxserve.roles.ffn import FFNPrograms
from jaxserve.roles.sampling import Finished
from jaxserve.roles.token_programs import GroupPut
from jaxserve.roles.weights import zeroed
from jaxserve.roles.worker import Passed

MODULE = "jaxserve.bench.overlap"
LAYERS = 8
ROWS = 32
"""Sequences of a lane, each with one decode token."""
CONTEXT = 512
"""Tokens that every one of them attends to; enough for an attend of 2 ms and more."""
LANES = (1, 2, 3)
WIDTH = 512
"""Width of the shared expert that calibration starts from."""
TOLERANCE = 0.05
LIMITS = {"device_put": 1.7, "pull": 1.4}
"""Of three lanes over one."""
_CALIBRATE_SECONDS, _RUN_SECONDS = 240.0, 300.0
_LEADER_STAYS_SECONDS = 3.0


def measure(quick: bool) -> Part:
    """Calibrates and runs both transports; starts no JAX in this process."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise BenchError("overlap: needs two cores")
    calls = ["--calls", "10" if quick else "40"]
    stages = run_worker(Worker(MODULE, ["calibrate", *calls], {}, cores[0]), _CALIBRATE_SECONDS)
    shared = ["run", "--width", str(stages["width"])]
    shared += ["--steps", "3" if quick else "6", "--rounds", "2" if quick else "8"]
    found: dict[str, list[Any]] = {}
    for transport in TRANSPORTS:
        both = [*shared, "--transport", transport, "--coordinator", f"127.0.0.1:{free_port()}"]
        workers = [
            Worker(MODULE, [*both, "--process", str(process)], {}, core)
            for process, core in enumerate(cores)
        ]
        found[transport] = run_workers(workers, _RUN_SECONDS)
    return report(stages, found)


def report(stages: dict[str, Any], found: dict[str, list[Any]]) -> Part:
    """The workers' numbers in words: `found` has both processes' results by transport."""
    attend, ffn = stages["attend_ms"], stages["ffn_ms"]
    measures = []
    for transport, (attention_side, ffn_side) in found.items():
        layer = {lanes: attention_side[str(lanes)]["layer_ms"] for lanes in LANES}
        link = max(0.0, layer[1] - attend - ffn)
        ideal = ideal_gains(attend, ffn, link)
        for lanes in (3, 2):
            gain = layer[1] / layer[lanes]
            limit = LIMITS.get(transport) if lanes == 3 else None
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
            core = ffn_side["3"]["core_ms"]
            measures.append(Measure("  core time of it, ffn", core, "ms"))
    measures += [Measure("attend alone", attend, "ms"), Measure("ffn alone", ffn, "ms")]
    notes = [
        f"{ROWS} decode tokens a lane, {CONTEXT} tokens of context, {LAYERS} MoE layers, FP32.",
        "The best of several rounds each: what else runs on a core only makes a round longer.",
        "Ideal: cycle max(t_a, t_f, t_link) with 3 lanes, max(t_a, t_f) + t_link / 2 with 2.",
        "Core time above attend or ffn alone is what host and link cost that core.",
    ]
    title = "(b) throughput of lanes, two processes of one core each"
    return Part("overlap", title, measures, notes, {"stages": stages, "runs": found})


def ideal_gains(attend: float, ffn: float, link: float) -> dict[int, float]:
    """Throughput of 2 and 3 lanes over one, by the cycle formulas of StepMesh and MegaScale-Infer.

    Args:
      attend, ffn, link: time of a layer's attend, ffn, and both crossings together.
    """
    serial = attend + ffn + link
    return {
        2: min(2.0, serial / (max(attend, ffn) + link / 2)),
        3: min(3.0, serial / max(attend, ffn, link)),
    }


def model_config(width: int) -> ModelConfig:
    """MoE layers whose shared expert has this width."""
    attention = MFA(q_heads=8, kv_heads=1, head_dim=64, latent=256, rope=Rope(theta=1e4))
    moe = FFN(router=Router(experts=8, top_k=2), expert_d_ff=64, d_ff=width)
    return ModelConfig(
        vocab=64,
        d_model=256,
        decoder=decoder_layers(LAYERS, attention, moe),
        norm_epsilon=1e-5,
        max_positions=CONTEXT,
    )


def deployment(lanes: int, transport: str, address: str = "") -> Deployment:
    """1A1F; over `pull` with the ffn worker at an address."""
    settings: dict[str, Any] = {"lanes": lanes, "link.transport": transport}
    if TRANSPORTS[transport].crosses_runtimes:
        settings |= {"ffn.runtime": "ffn", "link.addresses": [address]}
    return deployment_of(slots=ROWS, max_length=CONTEXT, page_size=16, **settings)


def calibrate(calls: int) -> dict[str, Any]:
    """Finds the width at which attend and ffn take equally long, both alone in this process.

    An ffn's time is a constant and a part in proportion to the width, so two widths tell which one
    is wanted.
    """
    jax.config.update("jax_num_cpu_devices", 2)
    model = build(deployment(1, "device_put"), model_config(WIDTH))
    attend, message = time_attend(model, calls)
    times = {WIDTH: time_ffn(WIDTH, message, calls)}
    width = _multiple(WIDTH * attend / times[WIDTH])
    while width not in times and len(times) < 6:
        times[width] = time_ffn(width, message, calls)
        if abs(times[width] / attend - 1) <= TOLERANCE:
            break
        below, above = sorted(times)[:2] if width < WIDTH else sorted(times)[-2:]
        slope = (times[above] - times[below]) / (above - below)
        width = _multiple(width + (attend - times[width]) / slope)
    width = min(times, key=lambda width: abs(times[width] - attend))
    return {"width": width, "attend_ms": attend, "ffn_ms": times[width], "tried": times}


def time_attend(model: RandomModel, calls: int) -> tuple[float, jax.Array]:
    """Milliseconds of one attend, and a message that it sends, on the ffn device."""
    enter, attend = (
        model.executables.enter,
        model.executables.attend[model.attention.config.layer(0)],
    )
    programs, leaves = model.attention, model.weights.layers[0]
    put = GroupPut(programs)
    batch, table = put(decode_plan(model.deployment, 0, CONTEXT))
    k, v = zeroed(programs.page_arrays, programs.mesh)
    x, message, k, v, *shared = enter(
        put.last_tokens(), table, batch, k, v, *model.weights.embedding, *leaves
    )
    combined = jax.device_put(np.asarray(x), x.sharding)

    def call() -> jax.Array:
        nonlocal x, k, v, message
        x, message, k, v = attend(x, table, *shared, k, v, combined, *leaves)
        return message

    spent = _milliseconds(call, calls)
    (arrived,) = model.link.dispatch(0, model.bucket.tokens).copier()([message])
    return spent, arrived


def time_ffn(width: int, message: jax.Array, calls: int) -> float:
    """Milliseconds of one ffn of this width."""
    templates, settings, meshes = templates_of(deployment(1, "device_put"), model_config(width))
    ((spec, template),) = templates.ffn.items()
    mesh = meshes.ffn
    programs = FFNPrograms(templates, settings, mesh)
    compiled = programs.ffn(bucket_of(settings).tokens, spec).compile()
    leaves = [
        jax.device_put(leaf, cached_sharding(mesh, spec))
        for leaf, spec in zip(template.random(0), template.specs(FFN_RULES), strict=True)
    ]
    table, counts = idle_experts(templates.slots, mesh)

    def call() -> Any:
        nonlocal counts
        answer, counts = compiled(message, table, counts, *leaves)
        return answer

    return _milliseconds(call, calls)


def _milliseconds(call: Callable[[], Any], calls: int) -> float:
    """Core time of a call: its time on a core of its own, whatever else runs here now."""
    samples = []
    for _ in range(calls + 2):
        start = time.process_time()
        jax.block_until_ready(call())
        samples.append(time.process_time() - start)
    return statistics.median(samples[2:]) * 1e3


def _multiple(width: float) -> int:
    """The nearest multiple of 16 (a vector register of floats)."""
    return max(16, round(width / 16) * 16)


class _Window(NamedTuple):
    """Some steps of each lane, in one process."""

    seconds: float
    core_seconds: float
    """CPU time of the whole process."""
    steps: int
    """Of all lanes together."""


def run_lanes(settings: Deployment, driver: Cell, lanes: int, steps: int) -> _Window:
    """`steps` steps on each of the first `lanes` lanes, in the order of the engine's loop."""
    left = dict.fromkeys(range(lanes), steps)
    unread: dict[int, Finished | Passed] = {}
    wall, core = time.perf_counter(), time.process_time()
    for lane in left:
        driver.begin(decode_plan(settings, lane, CONTEXT))
    while driver.active:
        finished = driver.advance()
        at = driver.at
        assert at is not None
        lane = at.lane
        if lane in unread:
            _read(unread.pop(lane))
        unread[lane] = finished
        left[lane] -= 1
        if left[lane]:
            driver.begin(decode_plan(settings, lane, CONTEXT))
    for finished in unread.values():
        _read(finished)
    return _Window(time.perf_counter() - wall, time.process_time() - core, lanes * steps)


def _read(finished: Finished | Passed) -> None:
    """What the leader does with a step's tokens, and a follower with the end of its part."""
    np.asarray(finished.last.addressable_data(0))


def run_apart(options: argparse.Namespace) -> dict[str, Any]:
    """One of two runtimes: the attention side measures, the ffn side answers until it has gone."""
    address, token = options.coordinator, "bench"
    settings = deployment(max(LANES), "pull", address)
    config = model_config(options.width)
    role: Role = "ffn" if options.process else "attention"
    initialise(ProcessArguments(role=role, token=token), settings)
    runtime = RoleRuntime.of(config, step3_names(config), settings, role)
    if role == "ffn":
        server, _ = message_server(runtime, settings, RandomLeaves(), token, address)
        server.start()
        deadline = time.monotonic() + _RUN_SECONDS
        while not server.domains and time.monotonic() < deadline:
            time.sleep(0.1)
        while server.domains and time.monotonic() < deadline:
            time.sleep(0.1)
        server.close()
        return {}
    driver, client = attention_cell(runtime, settings, RandomLeaves(), token)
    measured = measure_lanes(settings, driver, options)
    client.close()
    return measured


def run(options: argparse.Namespace) -> dict[str, Any]:
    """One of the two processes: all numbers of lanes in turn, several rounds."""
    if TRANSPORTS[options.transport].crosses_runtimes:
        return run_apart(options)
    settings = deployment(max(LANES), options.transport)
    initialise(
        ProcessArguments(process_id=options.process, processes=2, coordinator=options.coordinator),
        settings,
    )
    driver = build_local_cell(settings, model_config(options.width))
    measured = measure_lanes(settings, driver, options)
    # The leader goes last: JAX aborts a process whose coordination service is gone.
    barrier("measured")
    if options.process == 0:
        time.sleep(_LEADER_STAYS_SECONDS)
    jax.distributed.shutdown()
    return measured


def measure_lanes(
    settings: Deployment, driver: Cell, options: argparse.Namespace
) -> dict[str, Any]:
    """All numbers of lanes in turn, several rounds."""
    for lanes in LANES:
        run_lanes(settings, driver, lanes, 2)
    windows: dict[int, list[_Window]] = {lanes: [] for lanes in LANES}
    for _ in range(options.rounds):
        for lanes in LANES:
            windows[lanes].append(run_lanes(settings, driver, lanes, options.steps))
    return {str(lanes): _per_layer(windows[lanes]) for lanes in LANES}


def _per_layer(windows: list[_Window]) -> dict[str, Any]:
    layers = [window.steps * LAYERS for window in windows]
    wall = [w.seconds / n * 1e3 for w, n in zip(windows, layers, strict=True)]
    core = [w.core_seconds / n * 1e3 for w, n in zip(windows, layers, strict=True)]
    return {
        "layer_ms": min(wall),
        "core_ms": statistics.median(core),
        "rounds_ms": wall,
    }


def main() -> None:
    """The workers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["calibrate", "run"])
    parser.add_argument("--calls", type=int, default=40)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--transport", choices=TRANSPORTS, default="device_put")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--process", type=int, default=0)
    parser.add_argument("--coordinator", default="")
    parser.add_argument("--result", required=True)
    options = parser.parse_args()
    with writing(options.result) as result:
        result |= calibrate(options.calls) if options.mode == "calibrate" else run(options)


if __name__ == "__main__":
    main()
