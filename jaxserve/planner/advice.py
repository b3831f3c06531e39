"""Why no layout meets a target, and what would; and which rules of Step-3 a plan holds.

Called by `plan search` and `plan deploy`.
"""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from jaxserve.planner.cost import (
    attention_fit,
    ffn_batch,
    ffn_fit,
    minimum_sparsity,
    network_batch,
)
from jaxserve.planner.hardware import Hardware
from jaxserve.planner.layouts import Target
from jaxserve.planner.models import CostModel
from jaxserve.planner.search import Found, Plan, Searcher
from jaxserve.planner.stages import Calculator


def why_not(searcher: Searcher, target: Target, found: Found) -> str:
    """Explains which bound prevents the target, and lists single changes that would meet it."""
    if found.fastest is None:
        platforms = [
            {one.platform for one in r.values()} for r in (searcher.attention, searcher.ffn)
        ]
        lines = [_shortage(found, target, mixed=platforms[0].isdisjoint(platforms[1]))]
    else:
        plan = found.fastest
        name, bound = plan.slowest
        parts = ("dispatch", "combine") if name == "link" else (name,)
        stage = sum(plan.stages[part].seconds for part in parts)
        lines = [
            f"no layout reaches {target.tpot * 1e3:g} ms a token: the fastest, "
            f"{plan.layout.text}, takes {plan.tpot * 1e3:.1f} ms with one sequence a DP group; "
            f"its {name} stage takes {stage * 1e6:.0f} µs a layer, bound by {bound}"
        ]
    changes = "; ".join(_changes(searcher, target, found))
    lines.append(f"what would meet it: {changes}" if changes else "no change of one thing meets it")
    return "\n  ".join(lines)


def _shortage(found: Found, target: Target, *, mixed: bool) -> str:
    """Says what is missing. With `mixed` the roles have no platform in common."""
    if found.short is None:
        text = f"there is no layout of up to {target.max_devices} devices"
        return f"{text} of one platform: GPUs and TPUs do not serve together" if mixed else text
    layout, role, needed, there = found.short
    return (
        f"nothing fits on up to {target.max_devices} devices: the nearest layout, {layout.devices} "
        f"devices, needs {needed / 1e9:.1f} GB on each of the {role} role's (weights and one "
        f"sequence a lane) and has {there / 1e9:.1f} GB: bound by memory size"
    )


def _changes(searcher: Searcher, target: Target, found: Found) -> Iterator[str]:
    calculator, attention, ffn = searcher.calculator, searcher.attention, searcher.ffn

    def meets(calculator: Calculator, target: Target) -> bool:
        return Searcher(calculator, attention, ffn).feasible(target)

    for factor in (2, 4, 8):
        more = target.max_devices * factor
        if more <= 512 and meets(calculator, msgspec.structs.replace(target, max_devices=more)):
            yield f"up to {more} devices"
            break
    formats = calculator.formats
    for field in ("weights", "cache"):
        if getattr(formats, field) == "bfloat16":
            stored = all(h.stores("fp8") for h in (*attention.values(), *ffn.values()))
            name = "fp8" if stored else "int8"
            smaller = msgspec.structs.replace(formats, **{field: name})
            if meets(calculator._replace(formats=smaller), target):
                yield f"{field} in {name}"
    context = calculator.context
    while context > 256:
        context //= 2
        if meets(calculator._replace(context=context), target):
            yield f"a context of {context:,}"
            break
    if found.fastest is not None:
        yield f"a TPOT of {found.fastest.tpot * 1e3:.1f} ms"


class Check(NamedTuple):
    """A rule and whether it holds."""

    name: str
    holds: bool
    numbers: str

    @property
    def text(self) -> str:
        return f"{'holds' if self.holds else 'FAILS'}  {self.name}: {self.numbers}"


def checks(
    model: CostModel,
    context: int,
    tpot: float,
    attention: Hardware,
    ffn: Hardware,
    plan: Plan | None = None,
) -> Iterator[Check]:
    """Yields the rules for a pair of hardware and, given a plan, for its batch.

    Args:
      tpot: time per output token in seconds; each of the three pipeline stages gets a third.
    """
    stage = tpot / 3
    layer = stage / model.layers
    sparsity = model.moe.sparsity if model.moe else 1.0
    fills = ffn_batch(ffn, sparsity)
    if model.moe:
        least = minimum_sparsity(ffn, model.d_model, model.layers, stage)
        yield Check(
            "sparsity (§5.4)",
            sparsity >= least,
            f"experts' sparsity {sparsity:.3f}, least {least:.3f} for {ffn.name} at "
            f"{tpot * 1e3:g} ms: {fills:.0f} tokens fill the FFN, the network carries "
            f"{network_batch(ffn, model.d_model, model.layers, stage):.0f} a stage",
        )
    if plan is not None:
        tokens = plan.layout.dp * plan.batch
        yield Check(
            "FFN batch (§5.3)",
            tokens >= fills,
            f"{tokens} tokens a lane, {fills:.0f} make the FFN compute-bound on {ffn.name}",
        )
    fit = attention_fit(model, attention, layer)
    sequences = fit.cached_tokens // context
    yield Check(
        "attention in time (§6)",
        sequences >= 1,
        f"{attention.name} reads {fit.readable_bytes / 1e6:.0f} MB in {layer * 1e6:.0f} µs, of "
        f"which {fit.linear_bytes / 1e6:.0f} MB are weights: {fit.cached_tokens:,} tokens of "
        f"cache, {sequences} sequences of {context:,} a device and lane",
    )
    needed = ffn_fit(model, ffn, layer)
    yield Check(
        "FFN in time (§6)",
        needed.devices < 100,
        f"{needed.weight_bytes / 1e9:.0f} GB of FFN weights at half of the bandwidth take "
        f"{needed.hosts} hosts, {needed.devices} {ffn.name} (a hundred and more are trouble)",
    )
