"""`python -m jaxserve.bench experts`: the gain of moving experts, and the cost of counting.

One MoE layer of 64 experts over eight ranks with a redundant slot each; the busiest expert gets
more than eight times the mean. Experts are placed by the tokens of one draw and judged on others:
fresh draws of the same popularity, and draws after some experts have exchanged their popularity.
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.bench.random_model import deployment_of, model_config, templates_of
from jaxserve.bench.report import Measure, Part, median_ratio, take_turns
from jaxserve.bench.workers import Task, run_worker
from jaxserve.checkpoint.random_leaves import RandomLeaves
from jaxserve.checkpoint.step3 import step3_names
from jaxserve.config.model import FFN, RouterSpec
from jaxserve.config.sections import Experts
from jaxserve.mesh import FFN_AXES, cached_sharding
from jaxserve.model.ffn.placement import Placement, SlotSizes, balance_of, home_slots, replica_table
from jaxserve.model.ffn.replicas import choose_slots
from jaxserve.model.message import DispatchMessage
from jaxserve.roles.expert_balancer import ExpertFacts, propose
from jaxserve.roles.ffn import build_ffn
from jaxserve.roles.layout import Bucket

RANKS, EXPERTS, TOP_K, ROWS = 8, 64, 4, 512
D_MODEL, D_FF = 256, 256
TITLE = f"{EXPERTS} experts, EP {RANKS}, one redundant slot a device, {ROWS} rows of {TOP_K}"
DRAWS = 20
"""Fresh batches on which a placement is judged."""
SHIFTED = 16
"""Experts that exchange their popularity in a shift."""
SECONDS = 600.0


def measure(quick: bool) -> Iterator[Part]:
    """Measures in a process with an attention device and an ffn device a rank."""
    worker = Task(measure_layer, {"rounds": 3 if quick else 15}, devices=RANKS + 1)
    found = run_worker(worker, SECONDS)
    measures = [
        Measure("busiest expert ÷ mean", found["skew"], limit=8.0, better="more"),
        Measure("mean ÷ max tokens of a rank, fresh draws, at home", found["fresh"][0]),
        Measure("the same, moved", found["fresh"][1], limit=0.85, better="more"),
        Measure("the same after a shift of popularity, at home", found["shifted"][0]),
        Measure("the same, moved before the shift", found["shifted"][1]),
        Measure("a layer that counts ÷ one that does not", found["counting"], limit=1.01),
    ]
    notes = [
        f"{found['moves']} experts moved, placed by one draw; medians of {DRAWS} other draws. In a "
        f"shift {SHIFTED} experts, with the busiest, exchange their popularity at random."
    ]
    yield Part("experts", TITLE, measures, notes, found)


def measure_layer(rounds: int) -> dict[str, Any]:
    """Measures one MoE layer without a shared expert in this process."""
    exchanged = {"ffn.ep": RANKS, "ffn.redundant_slots": 1, "ffn.exchange": "gather"}
    deployment = deployment_of(slots=ROWS, max_length=16, page_size=16, **exchanged)
    moe = FFN(router=RouterSpec(experts=EXPERTS, top_k=TOP_K), expert_d_ff=D_FF)
    config = model_config(1, (2, 8, 8), moe, d_model=D_MODEL, positions=64)
    templates, meshes = templates_of(deployment, config)
    ffn = build_ffn(templates, deployment, meshes.ffn, RandomLeaves(), step3_names(config))
    sizes, popularity = ffn[0].slots, popularity_of()
    draw = np.random.default_rng(0)
    seen = chosen_experts(draw, popularity)
    counts = np.bincount(seen.ravel(), minlength=EXPERTS)
    home = home_slots(sizes)
    facts = ExpertFacts([0], sizes, slot_bytes=1)
    (layer,) = propose({0: counts[None]}, {0: home}, facts, Experts()).layers
    moved = tuple(layer.placement)
    fresh = [chosen_experts(draw, popularity) for _ in range(DRAWS)]
    shifted = [chosen_experts(draw, shift(draw, popularity)) for _ in range(DRAWS)]
    return {
        "skew": float(counts.max() / counts.mean()),
        "fresh": [balance(placement, fresh, sizes) for placement in (home, moved)],
        "shifted": [balance(placement, shifted, sizes) for placement in (home, moved)],
        "moves": layer.moves,
        "counting": counting_cost(ffn, moe, rows_of(fresh[0]), rounds),
    }


def popularity_of() -> np.ndarray:
    """Returns the weight of every expert in a row's draw. Three of five rows choose expert 0; the
    weights of the others fall off slowly. [experts]"""
    weights = 1 / (4 + np.arange(EXPERTS))
    weights[0] = weights[1:].sum() * 0.32
    return weights


def shift(draw: np.random.Generator, popularity: np.ndarray) -> np.ndarray:
    """Returns a popularity in which some experts, the busiest included, have exchanged theirs."""
    some = np.append(0, draw.choice(np.arange(1, EXPERTS), SHIFTED - 1, replace=False))
    shifted = popularity.copy()
    shifted[some] = popularity[draw.permutation(some)]
    return shifted


def chosen_experts(draw: np.random.Generator, popularity: np.ndarray) -> np.ndarray:
    """Draws different experts for every row, by their popularity. int32 [rows, top_k]"""
    noise = draw.gumbel(size=(ROWS, EXPERTS)) + np.log(popularity)
    return np.argsort(-noise, axis=1)[:, :TOP_K].astype(np.int32)


def balance(placement: Placement, draws: list[np.ndarray], sizes: SlotSizes) -> float:
    """Returns mean ÷ max tokens of a rank, as rows choose among replicas: a median of draws."""
    table = jnp.asarray(replica_table(placement, sizes))
    ranks = [
        np.asarray(choose_slots(jnp.asarray(one), table, sizes.total)) // sizes.local
        for one in draws
    ]
    loads = [np.bincount(one.ravel(), minlength=RANKS) for one in ranks]
    return statistics.median(map(balance_of, loads))


def rows_of(experts: np.ndarray) -> DispatchMessage:
    """Returns random rows with these experts."""
    x = np.random.default_rng(0).normal(size=(ROWS, D_MODEL)).astype(np.float32)
    gates = np.full((ROWS, TOP_K), 1 / TOP_K, np.float32)
    return DispatchMessage(jnp.asarray(x), jnp.asarray(experts), jnp.asarray(gates))


def counting_cost(ffn: Any, moe: FFN, rows: DispatchMessage, rounds: int) -> float:
    """Returns the core time of the layer's program over that of one that leaves the counts as they
    are.

    Args:
      ffn: as `build_ffn` returns it.
    """
    programs, _, weights, slots = ffn
    program = programs.ffn(Bucket(ROWS, 1), moe)
    packed = np.asarray(programs.formats["moe"].pack(rows))
    everywhere = np.zeros((RANKS * ROWS, packed.shape[1]), packed.dtype)
    everywhere[:ROWS] = packed
    sharding = cached_sharding(programs.mesh, jax.sharding.PartitionSpec(FFN_AXES))
    message = jax.device_put(everywhere, sharding)

    def body(message: Any, tables: Any, counts: Any, leaves: Any) -> tuple[jax.Array, ...]:
        return *program.body(message, tables, counts, leaves)[:-1], *counts

    (leaves,) = weights.blocks
    counts: dict[str, Any] = {}
    ways: dict[str, Callable[[], float]] = {}
    for name, each in (("with", program), ("without", program._replace(body=body))):
        compiled = each.compile()
        counts[name] = jax.device_put(np.asarray(slots.counts[0]), slots.counts[0].sharding)

        def run_layer(name: str, compiled: Any) -> float:
            start = time.process_time()
            answer, counts[name] = compiled(message, slots.tables[0], counts[name], *leaves)
            jax.block_until_ready((answer, counts[name]))
            return time.process_time() - start

        ways[name] = functools.partial(run_layer, name, compiled)
    taken = take_turns(ways, 5 * rounds)
    return median_ratio(taken["with"], taken["without"])
