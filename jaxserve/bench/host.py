"""Host time per layer and lane on 1A1F in one process: the driver against a bare loop; part of
`bench pipeline`.

The bare loop is the lower bound: the driver's own programs and copies, called one after the other
by a straight loop that knows everything beforehand. Both run the same model, tiny, so that devices
wait for the host; they take turns, and each ratio is the median of the ratios of single rounds. The
clock runs while one step is enqueued onto empty queues.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from jaxserve.bench.random_model import RandomModel, build, decode_plan, deployment_of, idle_experts
from jaxserve.bench.report import Measure, Part, median_ratio
from jaxserve.bench.timing import take_turns
from jaxserve.bench.workers import Worker, run_worker
from jaxserve.config.model import FFN, MFA, LayerKind, ModelConfig, Rope, Router
from jaxserve.roles.cell import Cell
from jaxserve.roles.compilation import hot_call
from jaxserve.roles.token_programs import GroupPut
from jaxserve.roles.weights import zeroed

LAYERS = 16
"""A quarter of a real model's, and fewer than the CPU backend allows in flight on a device (32)."""
KV_LENGTH = 3
KIND = LayerKind(
    MFA(q_heads=2, kv_heads=1, head_dim=8, latent=8, rope=Rope(theta=1e4)),
    FFN(router=Router(experts=4, top_k=2), expert_d_ff=8, d_ff=8),
)
_SECONDS = 300.0
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


Pages = list[Sequence[jax.Array]]
Step = Callable[[Pages, jax.Array, jax.Array, jax.Array], Any]
"""(pages, last tokens, batch, page table) → (last tokens, sampled, logits)."""


def experts_of(model: RandomModel, ffn: Any) -> Callable[..., jax.Array]:
    """Returns (layer, message…) → answer, with counts of its own."""
    leaves, mesh = model.ffn_weights.layers, model.ffn.mesh
    state = [idle_experts(model.ffn.slots, mesh) for _ in leaves]
    tables, counts = map(list, zip(*state, strict=True))

    def call(layer: int, *message: jax.Array) -> jax.Array:
        answer, counts[layer] = ffn(*message, tables[layer], counts[layer], *leaves[layer])
        return answer

    return call


def bare_step(model: RandomModel) -> Step:
    """The cheapest loop over the driver's own calls."""
    executables, weights = model.executables, model.weights
    enter, leave = executables.enter, executables.leave
    tokens, link = model.bucket.tokens, model.link
    attend = hot_call(executables.attend[KIND])
    size = model.ffn.contract.size(tokens)
    ffn = experts_of(model, hot_call(model.ffn_executables[KIND.ffn, size]))
    dispatch = link.dispatch(0, tokens).copier()
    combine = link.combine[tokens].copier()
    attention = weights.layers

    def step(pages: Pages, last: jax.Array, batch: jax.Array, table: jax.Array) -> Any:
        k, v = pages[0]
        x, message, k, v, *shared = enter(
            last, table, batch, k, v, *weights.embedding, *attention[0]
        )
        pages[0] = k, v
        (arrived,) = dispatch((message,))
        (combined,) = combine((ffn(0, arrived),))
        for layer in range(1, LAYERS):
            k, v = pages[layer]
            x, message, k, v = attend(x, table, *shared, k, v, combined, *attention[layer])
            pages[layer] = k, v
            (arrived,) = dispatch((message,))
            (combined,) = combine((ffn(layer, arrived),))
        return leave(x, last, batch, combined, *weights.head)

    return step


class _Timed(NamedTuple):
    """Seconds of enqueuing one step."""

    wall: float
    cpu: float


Run = Callable[[], _Timed]


def timed_driver(model: RandomModel, driver: Cell) -> Run:
    """Runs one step through a driver and times `advance`."""
    plan = decode_plan(model.deployment, 0, KV_LENGTH)

    def run() -> _Timed:
        driver.begin(plan)
        wall, cpu = time.perf_counter(), time.thread_time()
        finished = driver.advance()
        cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
        finished.last.block_until_ready()
        return _Timed(wall, cpu)

    return run


def timed_loop(model: RandomModel, step: Step) -> Run:
    """Runs one step through a loop with pages and last tokens of its own."""
    plan = decode_plan(model.deployment, 0, KV_LENGTH)
    programs = model.attention
    put = GroupPut(programs)
    pages: Pages = [zeroed(programs.pools[0].arrays, programs.mesh) for _ in range(LAYERS)]
    last = put.last_tokens()

    def run() -> _Timed:
        nonlocal last
        batch, table = put(plan)
        wall, cpu = time.perf_counter(), time.thread_time()
        last, _, logits = step(pages, last, batch, table)
        cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
        jax.block_until_ready(logits)
        return _Timed(wall, cpu)

    return run


def compare(rounds: int) -> dict[str, list[_Timed]]:
    """Times of every loop and round; the first tenth of the rounds warms up."""
    model = tiny_model()
    ways = {
        "driver": timed_driver(model, model.cell()),
        "bare": timed_loop(model, bare_step(model)),
    }
    return take_turns(ways, rounds, warm_ups=rounds // 10 + 1)
