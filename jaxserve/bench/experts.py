"""`python -m jaxserve.bench experts`: the gain of moving experts, the cost of moving and counting.

One MoE layer over eight simulated devices with a redundant slot each, whose busiest expert gets
more than eight times the mean. Devices share the cores here, so a stage's time is that of the
busiest rank, every rank timed alone; its rows are those that the moved placement gives it.
"""

import functools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.bench.random_leaves import RandomLeaves
from jaxserve.bench.random_model import deployment_of, templates_of
from jaxserve.bench.report import Measure, Part, median_ratio, percentile
from jaxserve.bench.timing import core_seconds, take_turns
from jaxserve.bench.workers import Worker, run_worker
from jaxserve.checkpoint.step3 import step3_names
from jaxserve.config.model import FFN, MFA, ModelConfig, Rope, Router, decoder_layers
from jaxserve.config.sections import Experts
from jaxserve.mesh import FFN_AXES, cached_sharding
from jaxserve.model.ffn.placement import Placement, aligned, replica_table
from jaxserve.model.ffn.replicas import choose_slots
from jaxserve.model.message import Message
from jaxserve.roles.actions import CountExperts, FetchExperts, MoveExperts
from jaxserve.roles.expert_balancer import ExpertBalancer, expert_facts, propose
from jaxserve.roles.expert_slots import ExpertSlots
from jaxserve.roles.ffn import FFNWorker, build_ffn
from pallas_kernels.grouped_matmul.routed import routed_swiglu
from pallas_kernels.input_major import InputMajor

RANKS, EXPERTS, TOP_K, ROWS = 8, 64, 4, 512
D_MODEL, D_FF = 256, 256
TITLE = f"{EXPERTS} experts, EP {RANKS}, one redundant slot a device, {ROWS} rows of {TOP_K}"
LAYERS = 8
"""Messages of a step."""
WINDOW = 5
"""Steps at rest, followed by as many while experts move; the turns give both the same load."""
SECONDS = 1200.0
SETTINGS = Experts(window_seconds=3600.0)


def measure(quick: bool) -> Iterator[Part]:
    """Measures in a process with one attention device and an ffn device a rank."""
    worker = Worker(measure_layer, {"quick": quick}, devices=RANKS + 1)
    yield _part(run_worker(worker, SECONDS))


def _part(found: dict[str, Any]) -> Part:
    (before, after), (fetch, load) = found["stage_ms"], found["action_ms"]
    measures = [
        Measure("busiest expert ÷ mean", found["skew"], limit=8.0, better="more"),
        Measure("mean ÷ max tokens of a rank, at home", found["balance"][0]),
        Measure("the same, moved", found["balance"][1], limit=0.85, better="more"),
        Measure("ffn stage (busiest rank's experts), at home", before, "ms"),
        Measure("the same, moved", after, "ms"),
        Measure("moved ÷ at home", after / before, limit=1.0),
        Measure("p99 of a step's time, moving ÷ at rest", found["p99_wall"], limit=1.1),
        Measure("the same of its core time", found["p99_core"], limit=1.1),
        Measure("core time of a piece to every rank ÷ a step's", fetch / found["step_ms"]),
        Measure("the same of every rank's load", load / found["step_ms"]),
        Measure("a layer that counts ÷ one that does not", found["counting"], limit=1.01),
    ]
    notes = [
        f"{found['moves']} experts moved; {found['steps']} steps at rest and as many moving, in "
        f"turns of {WINDOW}, with {found['rounds']} rounds"
    ]
    return Part("experts", TITLE, measures, notes, found)


class _Layer(NamedTuple):
    """MoE layer on the ffn mesh, with the balancer of its experts."""

    worker: FFNWorker
    balancer: ExpertBalancer
    message: jax.Array
    rows: Message
    programs: Any
    weights: Any

    @property
    def slots(self) -> ExpertSlots:
        """Slots of the experts."""
        assert self.worker.slots is not None
        return self.worker.slots

    def step(self) -> None:
        """Runs as many messages as a step has layers, after the actions that are due."""
        self.boundary()
        size = self.programs.contract.size(ROWS)
        for _ in range(LAYERS):
            answer = self.worker.answer(0, size, [self.message])
        jax.block_until_ready(answer)

    def boundary(self) -> None:
        """Carries out the actions that are due."""
        actions = self.balancer.due()
        for action in actions:
            self.slots.carry_out(action)
        self.balancer.carried_out(actions)

    def counted(self) -> np.ndarray:
        """Returns the tokens so far, [ranks, experts]."""
        self.slots.carry_out(CountExperts(0))
        ranks = self.slots.read_counts(0).counts
        return np.stack([ranks[rank][0] for rank in sorted(ranks)]).astype(np.int64)


def model_config() -> ModelConfig:
    """One MoE layer without a shared expert."""
    attention = MFA(q_heads=2, kv_heads=1, head_dim=8, latent=8, rope=Rope(theta=1e4))
    moe = FFN(router=Router(experts=EXPERTS, top_k=TOP_K), expert_d_ff=D_FF)
    return ModelConfig(
        vocab=64,
        d_model=D_MODEL,
        decoder=decoder_layers(1, attention, moe),
        norm_epsilon=1e-5,
        max_positions=64,
    )


def skewed_rows(seed: int = 0) -> Message:
    """Rows of which three in five choose expert 0; the others fall off slowly."""
    draw = np.random.default_rng(seed)
    weights = 1 / (4 + np.arange(EXPERTS))
    noise = draw.gumbel(size=(ROWS, EXPERTS)) + np.log(weights)
    noise[:, 0] = np.where(draw.random(ROWS) < 0.6, np.inf, -np.inf)
    experts = np.argsort(-noise, axis=1)[:, :TOP_K].astype(np.int32)
    x = draw.normal(size=(ROWS, D_MODEL)).astype(np.float32)
    gates = np.full((ROWS, TOP_K), 1 / TOP_K, np.float32)
    return Message(jnp.asarray(x), jnp.asarray(experts), jnp.asarray(gates))


def make_layer() -> _Layer:
    """Builds and loads the layer, and runs it once."""
    sizes: dict[str, Any] = {"ffn.ep": RANKS, "ffn.redundant_slots": 1, "ffn.exchange": "gather"}
    deployment = deployment_of(slots=ROWS, max_length=16, page_size=16, **sizes)
    config = model_config()
    templates, _, meshes = templates_of(deployment, config)
    built = build_ffn(templates, deployment, meshes.ffn, RandomLeaves(), step3_names(config))
    worker, facts = FFNWorker(*built), expert_facts(templates, SETTINGS)
    assert facts is not None
    rows, programs = skewed_rows(), built[0]
    packed = np.asarray(programs.formats["moe"].pack(rows))
    everywhere = np.zeros((RANKS * ROWS, packed.shape[1]), packed.dtype)
    everywhere[:ROWS] = packed
    sharding = cached_sharding(programs.mesh, jax.sharding.PartitionSpec(FFN_AXES))
    message = jax.device_put(everywhere, sharding)
    balancer = ExpertBalancer(
        facts, SETTINGS, lambda number, seconds: layer.slots.read_counts(number)
    )
    layer = _Layer(worker, balancer, message, rows, programs, built[2])
    layer.step()
    return layer


def rebalance(layer: _Layer) -> None:
    """Places experts by the counted tokens, and moves all of them."""
    counts = layer.counted().sum(axis=0)[None]
    facts = layer.balancer.facts
    proposal = propose({0: counts}, layer.balancer.placements, facts, Experts())
    layer.balancer.place({each.layer: tuple(each.placement) for each in proposal.layers})
    finish_moves(layer)


def stage_ms(layer: _Layer, placement: Placement, rounds: int) -> float:
    """Core milliseconds of the busiest rank's experts, every rank alone."""
    sizes = layer.balancer.facts.sizes
    entries = jnp.asarray(replica_table(placement, sizes))
    chosen = choose_slots(jnp.asarray(layer.rows.experts), entries, sizes.total)
    leaves = [np.asarray(leaf) for leaf in layer.weights.layers[0]]
    run = jax.jit(routed_swiglu)
    times = []
    for rank in range(RANKS):
        own = slice(rank * sizes.local, (rank + 1) * sizes.local)
        # By name; on CPUs float matrices lie input by input.
        down, gate, up = (InputMajor(jnp.asarray(leaf[own])) for leaf in leaves)
        call = (layer.rows.tokens, chosen - rank * sizes.local, layer.rows.gates, gate, up, down)
        times.append(_core_ms(functools.partial(run, *call), rounds))
    return max(times)


def counting(layer: _Layer, rounds: int) -> float:
    """Core time of the layer's program over that of one that leaves the counts as they are."""
    program = layer.programs.ffn(ROWS, layer.programs.config.moe)

    def body(message: Any, tables: Any, counts: Any, leaves: Any) -> tuple[jax.Array, ...]:
        return *program.body(message, tables, counts, leaves)[:-1], *counts

    slots, leaves = layer.slots, layer.weights.layers[0]
    counts: dict[str, Any] = {}
    ways: dict[str, Callable[[], float]] = {}
    for name, each in (("with", program), ("without", program._replace(body=body))):
        compiled = each.compile()
        counts[name] = jax.device_put(np.asarray(slots.counts[0]), slots.counts[0].sharding)

        def run_layer(name: str, compiled: Any) -> Any:
            answer, counts[name] = compiled(layer.message, slots.tables[0], counts[name], *leaves)
            return answer

        ways[name] = functools.partial(_core_ms, functools.partial(run_layer, name, compiled), 5)
    samples = take_turns(ways, rounds, warm_ups=0)
    return median_ratio(samples["with"], samples["without"])


class StepTimes(NamedTuple):
    """Seconds of each step, by the clock and of the cores."""

    wall: list[float]
    core: list[float]

    def p99(self, rest: "StepTimes") -> tuple[float, float]:
        """99th percentiles over those of `rest`."""
        wall, core = (
            percentile(a, 99) / percentile(b, 99) for a, b in zip(self, rest, strict=True)
        )
        return wall, core


def step_times(layer: _Layer, steps: int, times: StepTimes, *, moving: bool) -> int:
    """Adds steps to the times; with `moving`, experts move all the time at the default's rate.
    Returns the rounds that were begun."""
    draw, rounds = random.Random(len(times.wall)), 0
    sizes = layer.balancer.facts.sizes
    for _ in range(steps):
        if moving and not layer.balancer.view().moving:
            now = layer.balancer.placements[0]
            wanted = list(now)
            draw.shuffle(wanted)
            rounds += layer.balancer.place({0: aligned(now, tuple(wanted), sizes.ranks)})
        wall, core = time.perf_counter(), time.process_time()
        layer.step()
        times.wall.append(time.perf_counter() - wall)
        times.core.append(time.process_time() - core)
    return rounds


def finish_moves(layer: _Layer) -> None:
    """Carries out the remaining moves, between steps."""
    while layer.balancer.view().moving:
        layer.boundary()
        time.sleep(0.001)


def action_ms(layer: _Layer, rounds: int) -> tuple[float, float]:
    """Core milliseconds of the largest actions: a piece of an expert to every rank, and every
    rank's expert into its slot. Afterwards the slots no longer match the placement."""
    slots, local = layer.slots, layer.balancer.facts.sizes.local
    ring = [(((rank + 1) % RANKS) * local, rank * local) for rank in range(RANKS)]
    orders = (FetchExperts(0, ring, 0), MoveExperts(0, ring, list(slots.placements[0])))

    def carry_out(order: FetchExperts | MoveExperts) -> Any:
        slots.carry_out(order)
        return slots.room, layer.weights.layers[0]

    fetch, load = (_core_ms(functools.partial(carry_out, order), rounds) for order in orders)
    return fetch, load


def _core_ms(call: Callable[[], Any], calls: int) -> float:
    return statistics.median(core_seconds(call, calls)) * 1e3


def measure_layer(quick: bool) -> dict[str, Any]:
    """Measures everything in this process."""
    layer, rounds, windows = make_layer(), 3 if quick else 15, 2 if quick else 40
    home = layer.balancer.placements[0]
    per_expert = np.bincount(np.asarray(layer.rows.experts).ravel(), minlength=EXPERTS)
    balances, stages = [], [stage_ms(layer, home, rounds)]
    for moved in (False, True):
        if moved:
            rebalance(layer)
            stages.append(stage_ms(layer, layer.balancer.placements[0], rounds))
        before = layer.counted()
        layer.step()
        ranks = (layer.counted() - before).sum(axis=1)
        balances.append(float(ranks.mean() / ranks.max()))
    moves = layer.balancer.view().moves
    cost = counting(layer, rounds)
    rest, moving, made = StepTimes([], []), StepTimes([], []), 0
    for _ in range(windows):
        step_times(layer, WINDOW, rest, moving=False)
        made += step_times(layer, WINDOW, moving, moving=True)
        finish_moves(layer)
    wall, core = moving.p99(rest)
    fetch, load = action_ms(layer, rounds)
    return {
        "skew": float(per_expert.max() / per_expert.mean()),
        "balance": balances,
        "stage_ms": stages,
        "moves": moves,
        "rounds": made,
        "steps": len(rest.wall),
        "p99_wall": wall,
        "p99_core": core,
        "step_ms": statistics.median(rest.core) * 1e3,
        "action_ms": [fetch, load],
        "counting": cost,
    }
