"""Step-3's tables, by the formulas of its paper (arXiv 2507.19427) §4 and §5.4, and predictions of
what others measured: a search's, for the one layout and batch that was measured.

`python -m tests.jaxserve.planner.published` writes `tables.json` and `predicted.json` of
`configs/world/`.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jaxserve.config.shipped import CONFIGS
from jaxserve.config.topology import topology_of
from jaxserve.planner.assumptions import Formats
from jaxserve.planner.comparison import Cell, Predicted, SpeedRange, Table, Tables
from jaxserve.planner.hardware import Hardware, load_hardware, read_struct
from jaxserve.planner.layouts import Layout
from jaxserve.planner.models import STATE_BYTES, AttentionLayers, CostModel, load_model
from jaxserve.planner.options import acceptance, assumptions
from jaxserve.planner.search import Searcher
from jaxserve.planner.stage_times import attend
from jaxserve.planner.stages import Calculator
from jaxserve.planner.view import json_text

WORLD = CONFIGS / "world"
CONTEXTS = (8 * 1024, 32 * 1024)
FULL_IN_16_BITS = ("llama-4-maverick", "minimax-m1")
"""Models whose layers that see all tokens have a BF16 cache beside the others (§4.1)."""
LIGHTNING_FLOPS = 10.0
"""FLOPs of a token for each number of a state, in the paper's table 2."""


class TokenCost(NamedTuple):
    """A decoded token, all layers: 8 bits a cached number, but for §4.1's `FULL_IN_16_BITS`. States
    are read and written. Lightning attention has no decays and rates that are linear maps."""

    cache_bytes: float
    attention_flops: float
    linear_flops: float
    ffn_flops: float


def token_cost(model: CostModel, context: int) -> TokenCost:
    read = flops = lacking = 0.0
    for group in model.attention:
        numbers, size = cached_numbers(group, context), 2 * STATE_BYTES
        if not group.has_state:
            size = 1 if group.spec.window or model.name not in FULL_IN_16_BITS else 2
        read += group.layers * size * numbers
        flops += group.layers * attention_flops(group, context)
        lacking += group.has_state * group.layers * 2 * group.spec.q_heads * model.d_model
    linear = model.linear_parameters - lacking
    return TokenCost(read, flops, 2.0 * linear, 2.0 * model.ffn_activated)


def cached_numbers(group: AttentionLayers, context: int) -> int:
    """Numbers of keys and values, or of states, that one token reads in one layer."""
    if group.has_state:
        return group.state_numbers
    index = group.indexer.head_dim * group.scored(context) if group.indexer else 0
    arrays = (2 - group.one_row) * group.spec.kv_heads
    return arrays * group.key_dim * attended(group, context) + index


def attended(group: AttentionLayers, context: int) -> int:
    """Cached rows that a token attends to, after an indexer's choice."""
    seen, scored = group.seen(context), group.scored(context)
    return seen - scored + min(scored, group.indexer.top_k) if group.indexer else seen


def attention_flops(group: AttentionLayers, context: int) -> float:
    """q·k and p·v over every token. For latent attention the paper takes the cached row's width,
    576, for both; the true cost of the absorbed form is 5.6 % less."""
    if group.has_state:
        return LIGHTNING_FLOPS * group.state_numbers
    core = 4.0 * group.spec.q_heads * group.key_dim * attended(group, context)
    return core + group.index_flops * group.scored(context)


def peak(hardware: Hardware) -> float:
    """FP8, or BF16 on hardware without: INT8 is used to store, not to compute (§4.1)."""
    return hardware.flops("fp8")


def dollars(hardware: Hardware) -> tuple[float, float]:
    """Cost of a FLOP and of a byte at full use (table 5)."""
    each = hardware.price / 3600
    return each / peak(hardware), each / hardware.bandwidth


def attention_dollars(model: CostModel, context: int, hardware: Hardware) -> float:
    """USD per million tokens (§4.2): the core bound by compute or by memory, then linear maps."""
    cost, (flop, byte) = token_cost(model, context), dollars(hardware)
    core = max(cost.attention_flops * flop, cost.cache_bytes * byte)
    return 1e6 * (core + cost.linear_flops * flop)


def ffn_dollars(model: CostModel, hardware: Hardware) -> float:
    """USD per million tokens (§4.2): bound by compute, as large batches are."""
    return 1e6 * 2.0 * model.ffn_activated * dollars(hardware)[0]


def minimum_sparsity(
    hardware: Hardware, d_model: int, layers: int, stage_seconds: float = 0.0166
) -> float:
    """Part of the experts below which messages of a batch that fills the FFN take longer than a
    stage (§5.4): a third of 50 ms, 8-bit dispatch, 16-bit combine, one host's network. The paper
    rounds 16.6 ms × 2/3 to 11.1 ms."""
    network, fast = hardware.network_gb_s * 1e9, hardware.link * hardware.devices_per_host
    if hardware.link_devices > hardware.devices_per_host:
        network = max(network, fast)
    budget = round(stage_seconds * 2 / 3, 4)
    return d_model * peak(hardware) * layers / (network * hardware.bandwidth * budget)


def cell(value: float | None, printed: str) -> Cell:
    if value is None:
        return Cell(None, "N/A", printed)
    decimals = len(printed.partition("e")[0].partition(".")[2])
    ours = format(value, f".{decimals}{'e' if 'e' in printed else 'f'}")
    return Cell(float(f"{value:.12g}"), ours, printed)


def tables() -> Tables:
    paper = SimpleNamespace(**read_struct(WORLD / "step3.yaml", dict[str, Any]))
    models = {name: load_model(key) for name, key in paper.models.items()}
    hardware = {name: load_hardware(key) for name, key in paper.hardware.items()}
    step3, kinds = models["Step-3"], hardware.values()

    def peaks(name: str) -> list[float | None]:
        one = hardware[name]
        fp8 = one.flops("fp8") if "fp8" in one.teraflops else None
        roof = peak(one) / one.bandwidth
        return [one.price, one.flops("bfloat16"), fp8, one.bandwidth, roof]

    def costs(name: str) -> list[float]:
        found = [attention_dollars(models[name], context, h) for context in CONTEXTS for h in kinds]
        return found + [ffn_dollars(models[name], h) for h in kinds]

    def beside(name: str) -> list[float]:
        model, cost = models[name], token_cost(models[name], CONTEXTS[0])
        ffn = min(ffn_dollars(model, h) for h in kinds)
        best = [ffn + min(attention_dollars(model, c, h) for h in kinds) for c in CONTEXTS]
        activated = (cost.linear_flops + cost.ffn_flops) / 2 + model.vocab * model.d_model
        return [activated / 1e9, *best, cost.attention_flops / cost.cache_bytes]

    ours = {
        "Table 2": lambda name: token_cost(models[name], CONTEXTS[0]),
        "Table 3": lambda name: token_cost(models[name], CONTEXTS[1]),
        "Table 4": peaks,
        "Table 5": lambda name: dollars(hardware[name]),
        "Table 6": costs,
        "Table 7": lambda name: [minimum_sparsity(hardware[name], step3.d_model, step3.layers)],
        "Text": beside,
    }
    found, number, wrong = [], 0, []
    for name, one in paper.tables.items():
        rows = {}
        for label, printed in one["rows"].items():
            cells = zip(one["columns"], map(cell, ours[name](label), printed.split()), strict=True)
            rows[label] = own = {column: c for column, c in cells if c.printed != "."}
            number += len(own)
            wrong += [
                f"  {name}, {label}, {column}: {c.ours}, the paper prints {c.printed}"
                for column, c in own.items()
                if c.ours != c.printed
            ]
        found.append(Table(name, one["title"], one["columns"], rows))
    agree = f"{number - len(wrong)} of {number} printed numbers agree to the printed digits"
    return Tables(found, [agree, *wrong])


LAYER = "µs an attention layer"
LARGE = 0.35
"""Relative errors above this one need a reason."""
DEFAULTS = dict.fromkeys(("dp", "tp", "ffn_tp", "lanes"), 1)
DEFAULTS |= dict.fromkeys(("ep", "shared_ranks", "drafts", "fitted"), 0)
DEFAULTS |= {"acceptance": "", "assume": [], "why": ""}


def read_measurements() -> list[SimpleNamespace]:
    """Published numbers: `given` is what the source states, `taken` what it does not."""
    rows = read_struct(WORLD / "measurements.yaml", list[dict[str, Any]])
    return [SimpleNamespace(**DEFAULTS | row) for row in rows]


def predict(one: SimpleNamespace) -> float:
    """Our number, in the measurement's unit."""
    hardware, model = load_hardware(one.hardware), load_model(one.model)
    formats = msgspec.convert(one.formats, Formats)
    calculator = Calculator(model, one.context, formats, assumptions(one.assume))
    if one.quantity == LAYER:
        group = max(model.attention, key=lambda each: each.layers)
        return attend(calculator, group, hardware, one.tp, one.batch).seconds * 1e6
    accepted = acceptance(one.acceptance, one.drafts) if one.drafts else ()
    named = {one.hardware: hardware}
    names = ("mode", "dp", "tp", "lanes", "drafts", "shared_ranks")
    sizes = {name: getattr(one, name) for name in names}
    afd = topology_of(one.mode).has("ffn")
    ep, ffn_tp = (one.ep, one.ffn_tp) if afd else (one.dp, one.tp)
    layout = Layout(attention=one.hardware, ffn=one.hardware, ep=ep, ffn_tp=ffn_tp, **sizes)
    plan = Searcher(calculator, named, named, accepted).evaluate(layout, one.batch)
    if one.quantity == "ms a token":
        return plan.tpot * 1e3
    return plan.tokens_per_device * (hardware.jax_devices if "chip" in one.quantity else 1)


def predicted() -> Predicted:
    rows = {one.name: (one, float(f"{predict(one):.9g}")) for one in read_measurements()}
    errors = [(one, ours / one.measured - 1) for one, ours in rows.values()]
    free = [abs(error) for one, error in errors if not one.fitted]
    far = [one for one, error in errors if abs(error) > LARGE]
    slower = ("ms a token", LAYER)
    speeds = [
        error + 1 if one.quantity in slower else 1 / (error + 1)
        for one, error in errors
        if one.quantity != LAYER
    ]
    percentiles = (round(float(each), 4) for each in np.percentile(speeds, [10, 50, 90]))
    summary = (
        f"mean |error| {sum(free) / len(free):.0%} of {len(free)} numbers that nothing was fitted "
        f"to; {len(far)} above {LARGE:.0%}, {sum(not one.why for one in far)} of them "
        "without a reason"
    )
    speed = SpeedRange(len(speeds), *percentiles)
    return Predicted(speed, summary, {name: ours for name, (_, ours) in rows.items()})


if __name__ == "__main__":
    for name, made in {"tables": tables(), "predicted": predicted()}.items():
        (WORLD / f"{name}.json").write_text(json_text(made) + "\n")
