"""Host time per layer and lane on 1A1F in one process: the driver against a bare loop; part of
`bench pipeline`.

The bare loop is the lower bound: the driver's own programs and copies, called one after the other
by a straight loop that knows everything beforehand. Both run the same model, tiny, so that devices
wait for the host; they take turns, and each ratio is the median of the ratios of single rounds. The
clock runs while one step is enqueued onto empty queues.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxserve.bench.random_model import RandomModel, build, decode_plan, deployment_of, idle_experts
from jaxserve.bench.report import Measure, Part, median_ratio
from jaxserve.bench.timing import take_turns
from jaxserve.bench.workers import Worker, run_worker
from jaxserve.config.model import FFN, MFA, LayerKind, ModelConfig, Rope, RouterSpec
from jaxserve.roles.hot_call import hot_call
from jaxserve.roles.token_programs import GroupPut, zeroed

LAYERS = 16
"""A quarter of a real model's, and fewer than the CPU backend allows in flight on a device (32)."""
KV_LENGTH = 3
KIND = LayerKind(
    MFA(q_heads=2, kv_heads=1, head_dim=8, latent=8, rope=Rope(theta=1e4)),
    FFN(router=RouterSpec(experts=4, top_k=2), expert_d_ff=8, d_ff=8),
)
_SECONDS = 900.0
LIMIT = 1.15
"""Target of the driver's time over that of the bare loop."""
LOOPS = ("driver", "bare")


def measure(quick: bool) -> Iterator[Part]:
    """Measures in a process with a device of each role."""
    rounds = 20 if quick else 400
    found = run_worker(Worker(compare, {"rounds": rounds}, devices=2), _SECONDS)
    # A step's seconds by the clock and of the enqueuing thread, for each loop and round.
    wall, cpu = ({loop: [one[at] for one in found[loop]] for loop in LOOPS} for at in (0, 1))
    measures = []
    for clock, times, most in (("wall", wall, LIMIT), ("CPU", cpu, None)):
        ratio = median_ratio(times["driver"], times["bare"])
        measures.append(Measure(f"driver ÷ bare loop, {clock}", ratio, "", most))
    for loop in LOOPS:
        median = statistics.median(wall[loop]) / LAYERS
        measures.append(Measure(f"{loop}, a layer", median * 1e6, "µs"))
    notes = [
        "Medians. Targets: wall time on an idle machine; CPU is the enqueuing thread's own time."
    ]
    title = "host time per layer and lane, 1A1F in one process"
    yield Part("host", title, measures, notes, {"wall": wall, "cpu": cpu})


def tiny_model() -> RandomModel:
    """MoE layers whose programs take less time than their calls; INT8 on the wire."""
    config = ModelConfig(
        vocab=64,
        d_model=16,
        decoder=(KIND,) * LAYERS,
        norm_epsilon=1e-5,
        max_positions=64,
    )
    wire: dict[str, Any] = {"link.dispatch": "int8"}
    return build(deployment_of(slots=4, max_length=32, page_size=16, **wire), config)


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of enqueuing one step, by the clock and of this thread; waits for its arrays."""
    wall, cpu = time.perf_counter(), time.thread_time()
    arrays = call()
    cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
    jax.block_until_ready(arrays)
    return wall, cpu


def bare_loop(model: RandomModel) -> Callable[[], tuple[float, float]]:
    """Returns what runs one step of the cheapest loop over the driver's own calls. Pages, last
    tokens and counts are its own."""
    executables, weights, programs = model.executables, model.weights, model.attention
    tokens, link, mesh = model.bucket.tokens, model.link, model.ffn.mesh
    attend = hot_call(executables.attend[KIND])
    ffn = hot_call(model.ffn_executables[KIND.ffn, model.ffn.contract.size(tokens)])
    dispatch, combine = link.dispatch(0, tokens).copier(), link.combine[tokens].copier()
    state = [idle_experts(model.ffn.slots, mesh) for _ in range(LAYERS)]
    tables, counts = map(list, zip(*state, strict=True))
    arrays = programs.pools[0].arrays
    pages = [tuple(zeroed(arrays, programs.mesh)) for _ in range(LAYERS)]
    put, plan = GroupPut(programs), decode_plan(model.deployment, 0, KV_LENGTH)
    last = put.last_tokens()

    def experts(layer: int, message: jax.Array) -> jax.Array:
        (arrived,) = dispatch((message,))
        leaves = model.ffn_weights.blocks[layer]
        answer, counts[layer] = ffn(arrived, tables[layer], counts[layer], *leaves)
        (combined,) = combine((answer,))
        return combined

    def step(batch: jax.Array, table: jax.Array) -> Any:
        nonlocal last
        x, message, k, v, *shared = executables.enter(
            last, table, batch, *pages[0], *weights.embedding, *weights.layers[0]
        )
        pages[0] = k, v
        combined = experts(0, message)
        for layer in range(1, LAYERS):
            k, v = pages[layer]
            x, message, k, v = attend(x, table, *shared, k, v, combined, *weights.layers[layer])
            pages[layer] = k, v
            combined = experts(layer, message)
        last, _, logits = executables.leave(x, last, batch, combined, *weights.head)
        return logits

    def run() -> tuple[float, float]:
        batch, table = put(plan)
        return timed(lambda: step(batch, table))

    return run


def compare(rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of every loop and round; the first tenth of the rounds warms up."""
    model = tiny_model()
    driver, plan = model.cell(), decode_plan(model.deployment, 0, KV_LENGTH)

    def run_driver() -> tuple[float, float]:
        driver.begin(plan)
        return timed(lambda: driver.advance().last)

    ways = {"driver": run_driver, "bare": bare_loop(model)}
    return take_turns(ways, rounds, warm_ups=rounds // 10 + 1)
