"""Host time of a step of 61 layers and three lanes, by pipeline: part of `bench pipeline`.

With `pipeline: layer` the host makes a call a stage, layer and lane, and with `pipeline: step` one
for all layers and lanes. The pipelines are the engine's, over a tiny random model. They take turns
in a process with both roles, and in two processes with a role each. The measure is the core time of
the enqueuing thread, which leaves out the wait for a device's queue and other threads, and includes
the embedding, the head and the sampler of all lanes. Steps bring neither a sequence nor a page,
like most steps of a server: with pages of 64 tokens a sequence needs a new page every 64 steps.
"""

import functools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import msgspec

from jaxserve.bench.random_model import build_driver, decode_plan, deployment_of, model_config
from jaxserve.bench.report import Measure, Part, take_turns
from jaxserve.bench.workers import Task, leave_runtime, run_worker, run_workers
from jaxserve.config.deployment import Deployment
from jaxserve.config.model import FFN, RouterSpec
from jaxserve.fleet.arguments import ProcessArguments
from jaxserve.fleet.devices import initialise
from jaxserve.ports import free_port

LAYERS, LANES, KV_LENGTH = 61, 3, 3
"""Step-3's layers and the paper's lanes."""
MOE = FFN(router=RouterSpec(experts=4, top_k=2), expert_d_ff=8, d_ff=8)
CONFIG = model_config(LAYERS, (2, 8, 8), MOE, d_model=16, positions=64)
PIPELINES = ("layer", "step")
LIMIT_MS = 1.0
"""Target of a whole step and role with `pipeline: step`."""
_SECONDS = 900.0


def measure(quick: bool) -> Iterator[Part]:
    """Measures in a process with a device of each role, and in two processes."""
    rounds = 3 if quick else 100
    found = {"both roles": run_worker(Task(enqueue, {"rounds": rounds}, devices=2), _SECONDS)}
    given = {"rounds": rounds, "address": f"127.0.0.1:{free_port()}"}
    pair = [Task(enqueue, given | {"process": process}) for process in (0, 1)]
    found |= zip(("attention", "ffn"), run_workers(pair, _SECONDS), strict=True)
    measures = []
    for roles, times in found.items():
        layer, step = (statistics.median(times[pipeline]) * 1e3 for pipeline in PIPELINES)
        both = roles == "both roles"
        limit = None if both else LIMIT_MS
        measures.append(Measure(f"{roles}: pipeline: step", step, "ms", limit))
        if both:
            measures.append(Measure("  half of it, for each role", step / 2, "ms", LIMIT_MS))
        measures.append(Measure("  pipeline: layer", layer, "ms"))
        measures.append(Measure("  a layer and lane of it", layer / LAYERS / LANES * 1e3, "µs"))
    notes = ["Medians of the enqueuing thread's core time, in one process and in two."]
    title = f"host time of a step of {LAYERS} layers and {LANES} lanes"
    yield Part("host", title, measures, notes, found)


def deployment(pipeline: str) -> Deployment:
    """Describes 1A1F with INT8 on the wire."""
    shared: dict[str, Any] = {"lanes": LANES, "link.dispatch": "int8", "pipeline": pipeline}
    return deployment_of(slots=4, max_length=32, page_size=16, **shared)


def enqueue(rounds: int, address: str = "", process: int = 0) -> dict[str, list[float]]:
    """Returns the core seconds of every step, by pipeline, after a tenth of the rounds as warm-up.
    The process has both roles or, with the address of a coordinator, a single one."""
    if address:
        joined = ProcessArguments(process_id=process, processes=2, coordinator=address)
        initialise(joined, deployment("layer"))
    ways = {}
    for pipeline in PIPELINES:
        made = deployment(pipeline)
        plans = [decode_plan(made, lane, KV_LENGTH) for lane in range(LANES)]
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
