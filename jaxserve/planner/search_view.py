"""What a search found, for a terminal, for programs, and as a picture. Called by `plan.py`."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from jaxserve.config.topology import PlannedMode
from jaxserve.planner.checks import Check
from jaxserve.planner.search import STAGES, Plan
from jaxserve.planner.search_options import MONTH
from jaxserve.planner.svg import Series, chart
from jaxserve.planner.text import grid

MODES: dict[PlannedMode, str] = {"afd": "AFD", "ep": "colocated EP", "tp": "colocated TP"}


DECODE_ONLY = (
    "decode only: prompts come computed from elsewhere and cost nothing here; `plan deploy` sizes "
    "prefill, too"
)


def dollars_a_month(plan: Plan) -> float:
    """USD for a plan's devices."""
    return plan.dollars * plan.tokens_per_second * 3600 * MONTH / 1e6


def best_of(plans: Sequence[Plan], mode: PlannedMode, count: int) -> list[Plan]:
    """The cheapest of a mode that differ in hardware or in numbers of devices.

    Args:
      plans: cheapest first.
    """
    seen: dict[tuple[str, str, int, int], Plan] = {}
    for plan in plans:
        layout = plan.layout
        if layout.mode == mode:
            key = layout.attention, layout.ffn, layout.attention_devices, layout.ffn_devices
            seen.setdefault(key, plan)
    return list(seen.values())[:count]


def plans_text(plans: Sequence[Plan]) -> str:
    """A table, a plan a line."""
    return grid(plans_rows(plans))


def plans_rows(plans: Sequence[Plan]) -> list[list[str]]:
    """A heading, and a row a plan."""
    heading = ["", "devices", "batch", "TPOT ms", *(f"{name} µs" for name in STAGES)]
    heading += ["slowest", "tokens/s/device", "USD/M out", "USD/month", "GB A", "GB F"]
    rows = [heading]
    for plan in plans:
        name, bound = plan.slowest
        rows.append(
            [
                layout_text(plan),
                str(plan.layout.devices),
                f"{plan.layout.dp}x{plan.layout.lanes}x{plan.batch}",
                f"{plan.tpot * 1e3:.1f}",
                *(_stage(plan, stage) for stage in STAGES),
                f"{name}: {bound}",
                f"{plan.tokens_per_device:.0f}",
                f"{plan.dollars:.3f}",
                f"{dollars_a_month(plan):,.0f}",
                f"{plan.attention_bytes / 1e9:.1f}",
                f"{plan.ffn_bytes / 1e9:.1f}" if plan.ffn_bytes else "",
            ]
        )
    return rows


def _stage(plan: Plan, name: str) -> str:
    stage = plan.stages[name]
    return f"{stage.seconds * 1e6:.0f} {stage.bound[0]}"


LEGEND = (
    "batch: DP groups x lanes x sequences. A stage's time is of one layer and lane, with what "
    "bounds it: memory, compute, network, overhead."
)


def layout_text(plan: Plan) -> str:
    """Devices and sharding in a few words."""
    layout = plan.layout
    attention = f"{layout.attention_devices} {layout.attention} (dp {layout.dp} tp {layout.tp})"
    more = f", {layout.drafts} draft{'s' * (layout.drafts > 1)}" if layout.drafts else ""
    if layout.redundant_slots:
        more += f", {layout.redundant_slots} redundant slot{'s' * (layout.redundant_slots > 1)}"
    if layout.topology.has("colocated"):
        shared = f", {layout.shared_ranks} with the shared expert" if layout.shared_ranks else ""
        return attention + shared + more
    ep = f"ep {layout.ep}"
    if layout.shared_ranks:
        ep += f" = {layout.ep - layout.shared_ranks} + {layout.shared_ranks} shared"
    ffn = f"{layout.ffn_devices} {layout.ffn} ({ep} tp {layout.ffn_tp})"
    return f"{attention} + {ffn}{more}"


def check_lines(checks: Sequence[Check]) -> list[str]:
    """Whether it holds, its name and its numbers."""
    return [
        f"{'holds' if check.holds else 'FAILS'}  {check.name}: {check.numbers}" for check in checks
    ]


def plan_tree(plan: Plan) -> dict[str, Any]:
    """For `--json`. Seconds, bytes, USD."""
    slowest, bound = plan.slowest
    return {
        **msgspec.to_builtins(plan.layout),
        "devices": plan.layout.devices,
        "batch": plan.batch,
        "sequences": plan.sequences,
        "tokens_a_step": plan.tokens_a_step,
        "tpot_seconds": plan.tpot,
        "stages": {
            name: {"seconds": stage.seconds, "bound": stage.bound}
            for name, stage in plan.stages.items()
        },
        "slowest": {"stage": slowest, "bound": bound},
        "tokens_per_second": plan.tokens_per_second,
        "tokens_per_second_and_device": plan.tokens_per_device,
        "dollars_per_million_tokens": plan.dollars,
        "dollars_a_month": dollars_a_month(plan),
        "attention_bytes": plan.attention_bytes,
        "ffn_bytes": plan.ffn_bytes,
    }


def front_svg(
    title: str, fronts: Mapping[str, Sequence[Plan]], tpot: float, chosen: Plan | None = None
) -> str:
    """TPOT against cost, a line a mode, on logarithmic axes, with the target.

    Args:
      chosen: is marked.
    """
    series = [
        Series(name, [(plan.tpot * 1e3, plan.dollars) for plan in plans])
        for name, plans in fronts.items()
        if plans
    ]
    costs = [cost for one in series for _, cost in one.points]
    target = [(tpot * 1e3, min(costs)), (tpot * 1e3, max(costs))]
    series.append(Series(f"target {tpot * 1e3:g} ms", target, dashed=True))
    if chosen is not None:
        place = [(chosen.tpot * 1e3, chosen.dollars)]
        series.append(Series("chosen", place, line=False, names=["chosen"], chosen=True))
    return chart(title, "TPOT, ms", "USD a million tokens", series, logarithmic=True)
