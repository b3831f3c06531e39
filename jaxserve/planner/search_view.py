"""`plan search`: the cheapest layouts that meet a target, and their front of cost against TPOT."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from jaxserve.planner.assumptions import measured_speed
from jaxserve.planner.deployment_file import deployment_text, plan_file
from jaxserve.planner.layouts import MODES, Layout, Target
from jaxserve.planner.options import (
    check_positions,
    price_lines,
    read_formats,
    read_hardware,
    read_searcher,
    read_target,
)
from jaxserve.planner.search import Found, Plan, Searcher, front, why_not
from jaxserve.planner.view import Part, Report, Series, chart, declared, show

DECODE_ONLY = (
    "decode only: prompts come computed from elsewhere and cost nothing here; `plan deploy` sizes "
    "prefill, too"
)


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
        "dollars_a_month": plan.month,
        "attention_bytes": plan.attention_bytes,
        "ffn_bytes": plan.ffn_bytes,
    }


def front_svg(title: str, found: Found, target: Target, chosen: Plan) -> str:
    """TPOT against cost, a line for each mode, on logarithmic axes, with the target and the chosen
    plan."""
    fronts = {MODES[mode]: _front(found, mode) for mode in target.modes}
    points = {
        name: [(plan.tpot * 1e3, plan.dollars) for plan in plans] for name, plans in fronts.items()
    }
    series = [Series(name, own) for name, own in points.items() if own]
    costs, tpot = [cost for own in points.values() for _, cost in own], target.tpot * 1e3
    ends, place = [(tpot, min(costs)), (tpot, max(costs))], (chosen.tpot * 1e3, chosen.dollars)
    series.append(Series(f"target {tpot:g} ms", ends, dashed=True))
    series.append(Series("chosen", [place], line=False, names=["chosen"], chosen=True))
    return chart(title, "TPOT, ms", "USD a million tokens", series, logarithmic=True)


def balance_text(searcher: Searcher, layout: Layout, batch: int) -> str:
    """Says how many attention devices the analytic rule wants; empty where roles share devices."""
    if layout.topology.has("colocated"):
        return ""
    a, f = searcher.memory.on(layout)
    return searcher.balance(layout, batch).text(layout, (a.price, f.price))


def run(options: argparse.Namespace) -> int:
    """Searches, writes and shows; returns 1 if nothing meets the target.

    Raises:
      ConfigError: an option is wrong.
    """
    attention, ffn = read_hardware(options, options.attention_hardware, options.ffn_hardware)
    hardware = {**attention, **ffn}
    check_positions(options.model, options.configs, context=options.context)
    formats = read_formats(options, hardware)
    searcher = read_searcher(options, attention, ffn, options.context, formats)
    target = read_target(options, options.tpot, options.modes)
    found = searcher.search(target)
    if not found.plans:
        print(f"error: {why_not(searcher, target, found)}", file=sys.stderr)
        return 1
    cheapest, calculator = found.plans[0], searcher.calculator
    if options.write:
        file = plan_file(options, hardware, calculator)
        file.write(deployment_text(file, cheapest))
    title = f"{options.model}, {options.context:,} tokens, decode alone: cost against TPOT"
    picture = front_svg(title, found, target, cheapest)
    if options.svg:
        options.svg.write_text(picture, encoding="utf-8")
    prices, assumed = price_lines(hardware, options.price), msgspec.to_builtins(calculator.assumed)
    parts = declared("search", scope=DECODE_ONLY, prices=prices)
    tree: dict[str, Any] = {"scope": DECODE_ONLY, "prices": prices, "best": [], "front": []}
    measured = measured_speed().systems
    tree |= {"assumptions": assumed, "measured_over_predicted": measured._asdict()}
    for mode in target.modes:
        plans = [*map(searcher.with_memory, _best(found.plans, mode, options.best))]
        tree["front"] += map(plan_tree, _front(found, mode))
        if not plans:
            parts.append(Part(MODES[mode], lines=["nothing meets the target"]))
            continue
        parts += declared("mode", name=MODES[mode], plans=plans)
        tree["best"] += map(plan_tree, plans)
    picks = {"balance": balance_text(searcher, cheapest.layout, cheapest.batch)}
    told = picks | {
        "cheapest": cheapest,
        "measured": measured,
        "picture": picture,
        "assumed": assumed,
    }
    parts += declared("found", **told)
    title = f"{options.model} at {options.context:,} tokens within {target.tpot * 1e3:g} ms"
    show(options, Report(title, parts, tree))
    return 0
