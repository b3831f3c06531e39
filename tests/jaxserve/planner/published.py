"""Step-3's tables, by the formulas of its paper (arXiv 2507.19427) §4 and §5.4, and predictions of
what others measured: a search's, for the one layout and batch that was measured.

`python -m tests.jaxserve.planner.published` prints both beside the published numbers, and writes
`configs/measured_speed.json`.
"""

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jaxserve.config.attention.compressed import Compressed
from jaxserve.config.attention.mla import MLA
from jaxserve.config.model import Attention
from jaxserve.config.shipped import CONFIGS
from jaxserve.config.topology import topology_of
from jaxserve.planner.assumptions import Formats, MeasuredSpeed, SpeedRange
from jaxserve.planner.hardware import Hardware, load_hardware, read_struct
from jaxserve.planner.layouts import Layout
from jaxserve.planner.models import AttentionLayers, CostModel, load_model
from jaxserve.planner.options import acceptance, assumptions
from jaxserve.planner.search import Searcher
from jaxserve.planner.stage_times import Rows, attend, attending
from jaxserve.planner.stages import Calculator
from jaxserve.planner.view import PagePart, grid
from tests import golden

DATA = golden.FOLDER / "planner"
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
    read = flops = linear = 0.0
    plain = Formats(weights="bfloat16", cache="bfloat16")
    for group in model.attention:
        numbers, size = cached_numbers(group, context), 2 * 4
        if not (states := group.spec.state_numbers > 0):
            size = 1 if group.spec.window or model.name not in FULL_IN_16_BITS else 2
        read += group.layers * size * numbers
        flops += group.layers * attention_flops(group, context)
        linear += group.layers * model.declared(group.spec, plain, 1, "gpu").parameters
        linear -= states * group.layers * 2 * group.spec.q_heads * model.d_model
    return TokenCost(read, flops, 2.0 * linear, 2.0 * ffn_activated(model))


def ffn_activated(model: CostModel) -> int:
    """FFN parameters that a token meets, without the router."""
    widths = (g.layers * (g.top_k * g.expert_d_ff + g.shared_d_ff) for g in model.ffn)
    return 3 * model.d_model * sum(widths)


def cached_numbers(group: AttentionLayers, context: int) -> float:
    """Numbers of keys and values, or of states, that one token reads in one layer."""
    spec = group.spec
    if spec.state_numbers:
        return spec.state_numbers
    work = attended(group, context)
    index = spec.indexer.head_dim * work.scored[0] if spec.indexer else 0
    arrays = (1 if isinstance(spec, MLA | Compressed) else 2) * spec.kv_heads
    return arrays * row_width(spec) * work.pairs + index


def row_width(spec: Attention) -> int:
    return spec.kv_latent + spec.rope_dim if isinstance(spec, MLA) else spec.head_dim


def attended(group: AttentionLayers, context: int) -> Any:
    """What a token that decodes attends to, and scores."""
    rows = Rows(1, np.zeros(1, int), np.ones(1, int), np.array([context]), 1)
    return attending(group, 1, 1, rows, least=0).of(1)


def attention_flops(group: AttentionLayers, context: int) -> float:
    """q·k and p·v over every token. For latent attention the paper takes the cached row's width,
    576, for both; the true cost of the absorbed form is 5.6 % less."""
    if numbers := group.spec.state_numbers:
        return LIGHTNING_FLOPS * numbers
    work, scorer = attended(group, context), group.spec.own_indexer
    width = 4.0 * group.spec.q_heads * row_width(group.spec)
    index = 2.0 * scorer.heads * scorer.head_dim if scorer else 0.0
    return width * work.pairs + index * work.scored[0]


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
    return 1e6 * 2.0 * ffn_activated(model) * dollars(hardware)[0]


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


def shown(value: float | None, printed: str) -> str:
    """Our number with as many digits as the paper's."""
    decimals = len(printed.partition("e")[0].partition(".")[2])
    return "N/A" if value is None else f"{value:.{decimals}{'e' if 'e' in printed else 'f'}}"


def tables() -> str:
    """Our numbers, the paper's under a row that differs, and how many agree."""
    paper = SimpleNamespace(**read_struct(DATA / "paper_tables.yaml", dict[str, Any]))
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
        rows = [["", *one["columns"]]]
        for label, told in one["rows"].items():
            printed = ["" if cell == "." else cell for cell in told.split()]
            own = [c and shown(v, c) for v, c in zip(ours[name](label), printed, strict=True)]
            rows.append([label, *own])
            number += len([*filter(None, printed)])
            differ = [f"{c} !" * (c != mine) for mine, c in zip(own, printed, strict=True)]
            rows += [["  the paper", *differ]] if any(differ) else []
            wrong += [
                f"  {name}, {label}, {column}: {mine}, the paper prints {c}"
                for column, mine, c in zip(one["columns"], own, printed, strict=True)
                if mine != c
            ]
        found.append(PagePart(f"{name}: {one['title']}", rows).text)
    agree = f"{number - len(wrong)} of {number} printed numbers agree to the printed digits"
    return "\n\n".join([*found, "\n".join([agree, *wrong])]) + "\n"


LAYER = "µs an attention layer"
LARGE = 0.35
"""Relative errors above this one need a reason."""
DEFAULTS = dict.fromkeys(("dp", "tp", "ffn_tp", "lanes"), 1)
DEFAULTS |= dict.fromkeys(("ep", "shared_ranks", "drafts", "fitted"), 0)
DEFAULTS |= {"acceptance": "", "assume": [], "why": ""}


def read_measurements() -> list[SimpleNamespace]:
    """Published numbers: `given` is what the source states, `taken` what it does not."""
    rows = read_struct(DATA / "measured_by_others.yaml", list[dict[str, Any]])
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


def predicted() -> list[tuple[SimpleNamespace, float]]:
    """Every published number with our prediction."""
    return [(one, predict(one)) for one in read_measurements()]


def systems(rows: Sequence[tuple[SimpleNamespace, float]]) -> str:
    """What others measured beside what we predict, and the mean error."""
    cells = [["", "quantity", "measured", "predicted", "error"]]
    for one, ours in rows:
        error = f"{ours / one.measured - 1:+.0%}{' fitted' * one.fitted}"
        cells.append([one.name, one.quantity, f"{one.measured:g}", f"{ours:.4g}", error])
    free = [abs(ours / one.measured - 1) for one, ours in rows if not one.fitted]
    far = [one for one, ours in rows if abs(ours / one.measured - 1) > LARGE]
    summary = (
        f"mean |error| {sum(free) / len(free):.0%} of {len(free)} numbers that nothing was fitted "
        f"to; {len(far)} above {LARGE:.0%}, {sum(not one.why for one in far)} of them "
        "without a reason"
    )
    reasons = (f"  {one.name}: {one.why}" for one in far)
    return "\n".join([grid(cells), "", summary, *reasons, ""])


def speeds(rows: Sequence[tuple[SimpleNamespace, float]]) -> MeasuredSpeed:
    """Measured over predicted speed of whole systems, together and by mode."""
    found: dict[str, list[float]] = {}
    for one, ours in rows:
        if one.quantity != LAYER:
            ratio = ours / one.measured if one.quantity == "ms a token" else one.measured / ours
            found.setdefault(one.mode, []).append(ratio)

    def ends(own: list[float]) -> SpeedRange:
        return SpeedRange(len(own), *(round(float(p), 4) for p in np.percentile(own, [10, 50, 90])))

    whole = ends([*itertools.chain(*found.values())])
    return MeasuredSpeed(whole, {mode: ends(own) for mode, own in found.items()})


if __name__ == "__main__":
    others = predicted()
    print(f"{tables()}\n{systems(others)}")
    text = msgspec.json.format(msgspec.json.encode(speeds(others)))  # lists, as they are read
    (CONFIGS / "measured_speed.json").write_bytes(text + b"\n")
