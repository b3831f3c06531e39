"""`plan search`: the cheapest layouts, for a terminal, for programs, and as a picture.

Its pictures and trees are those of `plan deploy`, too.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from jaxserve.errors import ConfigError
from jaxserve.planner.advice import checks, why_not
from jaxserve.planner.deployment_file import plan_file, write_plan
from jaxserve.planner.hardware import MONTH
from jaxserve.planner.layouts import MODES, Target
from jaxserve.planner.options import (
    positions,
    price_lines,
    read_formats,
    read_hardware,
    read_searcher,
    read_target,
)
from jaxserve.planner.search import STAGES, Found, Plan, front
from jaxserve.planner.svg import Series, chart
from jaxserve.planner.view import Part, Report, show

DECODE_ONLY = (
    "decode only: prompts come computed from elsewhere and cost nothing here; `plan deploy` sizes "
    "prefill, too"
)
LEGEND = (
    "batch: DP groups x lanes x sequences. A stage's time is of one layer and lane, with what "
    "bounds it: memory, compute, network, overhead."
)


def _month(plan: Plan) -> float:
    """USD a month for a plan's devices."""
    return plan.dollars * plan.tokens_per_second * 3600 * MONTH / 1e6


def _best(plans: Sequence[Plan], mode: str, count: int) -> list[Plan]:
    """The cheapest of a mode that differ in hardware or in numbers of devices.

    Args:
      plans: cheapest first.
    """
    seen: dict[tuple[object, ...], Plan] = {}
    for one, plan in ((plan.layout, plan) for plan in plans if plan.layout.mode == mode):
        seen.setdefault((one.attention, one.ffn, one.attention_devices, one.ffn_devices), plan)
    return list(seen.values())[:count]


def _front(found: Found, mode: str) -> list[Plan]:
    return front([plan for plan in found.points if plan.layout.mode == mode])


def _rows(plans: Sequence[Plan]) -> list[list[str]]:
    rows = [["", "devices", "batch", "TPOT ms", *(f"{name} µs" for name in STAGES)]]
    rows[0] += ["slowest", "tokens/s/device", "USD/M out", "USD/month", "GB A", "GB F"]
    for plan in plans:
        stages = (plan.stages[name] for name in STAGES)
        rows.append(
            [
                plan.layout.text,
                str(plan.layout.devices),
                f"{plan.layout.dp}x{plan.layout.lanes}x{plan.batch}",
                f"{plan.tpot * 1e3:.1f}",
                *(f"{stage.seconds * 1e6:.0f} {stage.bound[0]}" for stage in stages),
                ": ".join(plan.slowest),
                f"{plan.tokens_per_device:.0f}",
                f"{plan.dollars:.3f}",
                f"{_month(plan):,.0f}",
                f"{plan.attention_bytes / 1e9:.1f}",
                f"{plan.ffn_bytes / 1e9:.1f}" if plan.ffn_bytes else "",
            ]
        )
    return rows


def plan_tree(plan: Plan) -> dict[str, Any]:
    """A plan for `--json`: seconds, bytes, USD."""
    slowest, bound = plan.slowest
    return {
        **msgspec.to_builtins(plan.layout),
        "devices": plan.layout.devices,
        "batch": plan.batch,
        "sequences": plan.sequences,
        "tokens_a_step": plan.tokens_a_step,
        "tpot_seconds": plan.tpot,
        "stages": {name: stage._asdict() for name, stage in plan.stages.items()},
        "slowest": {"stage": slowest, "bound": bound},
        "tokens_per_second": plan.tokens_per_second,
        "tokens_per_second_and_device": plan.tokens_per_device,
        "dollars_per_million_tokens": plan.dollars,
        "dollars_a_month": _month(plan),
        "attention_bytes": plan.attention_bytes,
        "ffn_bytes": plan.ffn_bytes,
    }


def front_svg(title: str, found: Found, target: Target, chosen: Plan) -> str:
    """TPOT against cost, a line for each mode, on logarithmic axes, with the target and the chosen
    plan."""
    fronts = {MODES[mode]: _front(found, mode) for mode in target.modes}
    series = [
        Series(name, [(plan.tpot * 1e3, plan.dollars) for plan in plans])
        for name, plans in fronts.items()
        if plans
    ]
    costs = [cost for one in series for _, cost in one.points]
    tpot = target.tpot * 1e3
    ends = [(tpot, min(costs)), (tpot, max(costs))]
    series.append(Series(f"target {tpot:g} ms", ends, dashed=True))
    place = [(chosen.tpot * 1e3, chosen.dollars)]
    series.append(Series("chosen", place, line=False, names=["chosen"], chosen=True))
    return chart(title, "TPOT, ms", "USD a million tokens", series, logarithmic=True)


def run(options: argparse.Namespace) -> int:
    """Searches, writes and shows; returns 1 if nothing meets the target.

    Raises:
      ConfigError: an option is wrong.
    """
    attention, ffn = read_hardware(options, options.attention_hardware, options.ffn_hardware)
    hardware = {**attention, **ffn}
    most = positions(options.model, options.configs)
    if most is not None and options.context > most:
        raise ConfigError(f"--context {options.context}: {options.model} has {most} positions")
    formats = read_formats(options, hardware)
    searcher = read_searcher(options, attention, ffn, options.context, formats)
    target = read_target(options, options.tpot, options.modes)
    found = searcher.search(target)
    if not found.plans:
        print(f"error: {why_not(searcher, target, found)}", file=sys.stderr)
        return 1
    cheapest, calculator = found.plans[0], searcher.calculator
    if options.write:
        write_plan(plan_file(options, hardware), cheapest, searcher)
    title = f"{options.model}, {options.context:,} tokens, decode alone: cost against TPOT"
    picture = front_svg(title, found, target, cheapest)
    if options.svg:
        options.svg.write_text(picture, encoding="utf-8")
    prices, assumed = price_lines(hardware, options.price), msgspec.to_builtins(calculator.assumed)
    parts = [Part(lines=[DECODE_ONLY, *prices])]
    tree: dict[str, Any] = {"scope": DECODE_ONLY, "prices": prices, "best": [], "front": []}
    tree |= {"checks": {}, "assumptions": assumed}
    for mode in target.modes:
        plans = _best(found.plans, mode, options.best)
        tree["front"] += map(plan_tree, _front(found, mode))
        if not plans:
            parts.append(Part(MODES[mode], lines=["nothing meets the target"]))
            continue
        layout = plans[0].layout
        roles = hardware[layout.attention], hardware[layout.ffn]
        rules = list(checks(calculator.model, options.context, options.tpot, *roles, plans[0]))
        parts.append(Part(MODES[mode], _rows(plans), [rule.text for rule in rules]))
        tree["best"] += map(plan_tree, plans)
        tree["checks"][mode] = [rule._asdict() for rule in rules]
    money = f"{cheapest.dollars:.3f} USD a million tokens out, {_month(cheapest):,.0f} USD a month"
    values = ", ".join(f"{name} = {value}" for name, value in assumed.items())
    parts += [
        Part(lines=[LEGEND, f"cheapest: {cheapest.layout.text}, {money}"]),
        Part("Cost against TPOT", pictures=[picture], aside=True),
        Part("Assumptions", lines=[values], aside=True),
    ]
    title = f"{options.model} at {options.context:,} tokens within {target.tpot * 1e3:g} ms"
    show(options, Report(title, parts, tree))
    return 0
