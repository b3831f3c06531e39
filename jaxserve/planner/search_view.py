"""`plan search`: the cheapest layouts that meet a target, and their front of cost against TPOT.

`plan map`: the cheapest AFD, EP and TP over models, hardware, contexts and TPOTs, and who should
use AFD. A case is two searches: of AFD on the mix, and of colocation on either kind.

`plan deploy` (`fleet/deploy_command.py`): what a plan of a whole deployment shows.
"""

import argparse
import contextlib
import functools
import itertools
import multiprocessing
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import msgspec

from jaxserve.config.topology import PlannedMode
from jaxserve.planner.assumptions import measured_speed
from jaxserve.planner.deploy import Sizer
from jaxserve.planner.deploy_fleet import Asked, FleetPlan, Planned
from jaxserve.planner.deployment_file import deployment_text, plan_file
from jaxserve.planner.layouts import MODES, Layout, Target
from jaxserve.planner.options import (
    TABLE,
    check_positions,
    check_prices,
    price_lines,
    read_formats,
    read_hardware,
    read_searcher,
    read_target,
)
from jaxserve.planner.results import FleetResult
from jaxserve.planner.search import Found, Plan, Searcher, front, why_not
from jaxserve.planner.view import Report, Series, chart, reported, show

DECODE_ONLY = (
    "decode only: prompts come computed from elsewhere and cost nothing here; `plan deploy` sizes "
    "prefill, too"
)


def _best(plans: Sequence[Plan], mode: str, count: int) -> list[Plan]:
    """Returns the cheapest of a mode that differ in hardware or in numbers of devices, from plans
    in order of their cost."""
    seen: dict[tuple[object, ...], Plan] = {}
    for one, plan in ((plan.layout, plan) for plan in plans if plan.layout.mode == mode):
        seen.setdefault((one.attention, one.ffn, one.attention_devices, one.ffn_devices), plan)
    return list(seen.values())[:count]


def _front(found: Found, mode: str) -> list[Plan]:
    return front([plan for plan in found.points if plan.layout.mode == mode])


def front_svg(title: str, found: Found, target: Target, chosen: Plan) -> str:
    """TPOT against cost on logarithmic axes: a line a mode, the target, the chosen plan."""
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
    """Searches, writes and shows; returns 1 if nothing meets the target."""
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
        file.write(deployment_text(file, cheapest, target.tpot))
    title = f"{options.model}, {options.context:,} tokens, decode alone: cost against TPOT"
    picture = front_svg(title, found, target, cheapest)
    if options.svg:
        options.svg.write_text(picture, encoding="utf-8")
    best = [_best(found.plans, mode, options.best) for mode in target.modes]
    best = [[*map(searcher.with_memory, plans)] for plans in best]
    report = reported(
        "search",
        f"{options.model} at {options.context:,} tokens within {target.tpot * 1e3:g} ms",
        scope=DECODE_ONLY,
        prices=price_lines(hardware, options.price),
        modes=[*zip(map(MODES.__getitem__, target.modes), best, strict=True)],
        best=[*itertools.chain(*best)],
        front=[plan for mode in target.modes for plan in _front(found, mode)],
        cheapest=cheapest,
        balance=balance_text(searcher, cheapest.layout, cheapest.batch),
        measured=measured_speed().systems,
        assumed=calculator.assumed,
        meanings=TABLE["assumptions"],
        picture=picture,
    )
    show(options, report)
    return 0


# ------------------------------------------------------------------------------------ the map


class Case(NamedTuple):
    """A point of the map."""

    model: str
    mix: str
    context: int
    tpot: float
    """Target of the time between tokens, seconds."""
    best: Mapping[PlannedMode, Plan]
    """The cheapest plan of each mode that meets the TPOT."""

    @property
    def ratio(self) -> float | None:
        """Cost of AFD over the cheaper of EP and TP; None: one of both does not meet the TPOT."""
        afd, colocated = self.best.get("afd"), self._colocated
        return afd.dollars / min(colocated)[0] if afd and colocated else None

    @property
    def _colocated(self) -> list[tuple[float, PlannedMode]]:
        afd, plans = self.best.get("afd"), self.best.items()
        return [(plan.dollars, mode) for mode, plan in plans if plan is not afd]

    @property
    def likely(self) -> tuple[float, float] | None:
        """The ratio at p10 and p90 of the speed that published systems of these modes reached."""
        if self.ratio is None:
            return None
        speed = measured_speed().modes
        afd, other = speed["afd"], speed[min(self._colocated)[1]]
        return self.ratio * other.p10 / afd.p90, self.ratio * other.p90 / afd.p10

    @property
    def winner(self) -> PlannedMode | None:
        """The cheapest mode; None: nothing meets the TPOT."""
        return min(self.best, key=lambda mode: self.best[mode].dollars, default=None)


def map_cases(options: argparse.Namespace, model: str, mix: str) -> list[Case]:
    """Returns the cheapest plan of each mode for each context and TPOT, on `h800`, or on
    `h20+h800`: attention on the one, FFN on the other. Raises ConfigError if an option is wrong."""
    options = argparse.Namespace(**{**vars(options), "model": model})
    names = mix.partition("+")
    options.price = [(name, usd) for name, usd in options.price if name in names]
    attention, ffn = read_hardware(options, [names[0]], [names[2] or names[0]])
    both = {**attention, **ffn}
    if not all(one.stores("fp8") for one in both.values()) and options.compute == "fp8":
        options.compute = "auto"
    formats, found = read_formats(options, both), []
    for context in options.contexts:
        apart = read_searcher(options, attention, ffn, context, formats)
        together = Searcher(apart.calculator, both, both, apart.acceptance, apart.skew)
        for tpot in options.tpots:
            best: dict[PlannedMode, Plan] = {}
            plans = apart.search(read_target(options, tpot, ["afd"])).plans
            plans += together.search(read_target(options, tpot, ["ep", "tp"])).plans
            for plan in plans:
                best.setdefault(plan.layout.mode, plan)
            best = {mode: together.with_memory(plan) for mode, plan in best.items()}
            found.append(Case(model, mix, context, tpot, best))
    return found


def advised(found: Sequence[Case]) -> list[dict[str, Any]]:
    """Returns for each model and TPOT in how many cases AFD is the cheapest, of those that AFD and
    colocation both meet, and the case in which it costs least over colocation."""
    rows = []
    for model, tpot in dict.fromkeys((case.model, case.tpot) for case in found):
        own = [case for case in found if (case.model, case.tpot) == (model, tpot)]
        both = sorted((case.ratio, number) for number, case in enumerate(own) if case.ratio)
        won, least = sum(ratio < 1 for ratio, _ in both), own[both[0][1]] if both else None
        rows.append({"model": model, "tpot": tpot, "won": won, "both": len(both), "least": least})
    return rows


def map_values(found: Sequence[Case]) -> dict[str, Any]:
    """Returns what the report says: advice, the cases, and how often which mode is cheapest."""
    ratios = sorted(case.ratio for case in found if case.ratio)
    winners = [case.winner for case in found]
    return {
        "scope": DECODE_ONLY,
        "cases": found,
        "advised": advised(found),
        "ratios": ratios,
        "median": statistics.median(ratios) if ratios else None,
        "won": {name: winners.count(mode) for mode, name in MODES.items()},
        "lost": winners.count(None),
    }


def run_map(options: argparse.Namespace) -> None:
    """Evaluates all cases, and shows them."""
    for name, values in TABLE["commands"]["map"]["full" if options.full else "some"].items():
        setattr(options, name, getattr(options, name) or values)
    for model in options.models:
        check_positions(model, options.configs, contexts=max(options.contexts))
    check_prices(options, {name for mix in options.hardware for name in mix.split("+")})
    found, pairs = [], [*itertools.product(options.models, options.hardware)]
    sent = argparse.Namespace(**{**vars(options), "run": None})  # functions cannot be sent
    cases = functools.partial(map_cases, sent)
    with contextlib.ExitStack() as stack:
        results: Iterator[list[Case]] = itertools.starmap(cases, pairs)
        if (jobs := min(options.jobs or os.cpu_count() or 1, len(pairs))) > 1:
            pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))
            results = stack.enter_context(pool).map(cases, *zip(*pairs, strict=True))
        for (model, mix), own in zip(pairs, results, strict=True):
            print(f"{model} on {mix}", file=sys.stderr)
            found += own
    show(options, reported("map", "Where AFD, EP and TP are the cheapest", **map_values(found)))


# --------------------------------------------------------------------------- a whole deployment


def deploy_report(title: str, sizer: Sizer, planned: Planned, **told: Any) -> Report:
    """The plan with its latency, load, cost, sensitivity and alternatives. It is told `prices`, a
    line for each kind of hardware; `of_file`, times from the simulation of the written file; and
    `command`, that of `plan simulate` for it, empty where no file was written."""
    made, asked = planned.best, sizer.asked
    unit, taken = made.fleet.unit, max(1, round(made.fleet.taken))
    axes = f"Decode alone: cost against TPOT, {sizer.context:,} tokens"
    told |= {
        "sizer": sizer,
        "planned": planned,
        "modes": MODES,
        "latency": _latency(asked, made.prediction, told["of_file"]),
        "balance": balance_text(unit.pace.longest(taken), unit.layout, taken),
        "measured": measured_speed().systems,
        "sensitivity": _sensitivity(sizer, made),
        "picture": front_svg(axes, planned.found, asked.target, unit.plan),
    }
    return reported("deploy", title, **told)


def _latency(asked: Asked, found: FleetResult, of_file: FleetResult | None) -> list[dict[str, Any]]:
    """TTFT and TPOT as sized, and as the written file's simulation gave them."""
    rows = []
    for name, level in {"ttft": asked.ttft, "tpot": asked.tpot}.items():
        for label, result in (("", found), ("of the file", of_file)):
            if result is not None:
                shown_as = f"  {name.upper()} {label}" if label else name.upper()
                times, there = getattr(result, name), getattr(result, f"{name}_asked")
                rows.append({"name": shown_as, "times": times, "level": level, "there": there})
            for part, times in found.waits.items() if (name, label) == ("ttft", "") else ():
                rows += [{"name": f"  wait for {part}", "times": times}] if times else []
    return rows


def _variants(asked: Asked) -> Iterator[tuple[str, Asked, float]]:
    """Yields demands, prices and targets a fifth less and more: (name, what is asked, factor of
    prices)."""
    replace, demand = msgspec.structs.replace, asked.demand
    factors = {"-20 %": 0.8, "+20 %": 1.2}
    fields = {"rate": "rate", "prompts": "prompt", "outputs": "output", "hits": "hits"}
    for name, field in fields.items():
        value = getattr(demand, field)
        for sign, factor in factors.items() if value else ():
            changed = {"hits": min(0.99, value * factor), "rate": value * factor}
            more = {field: changed.get(field, round(value * factor))}
            yield f"{name} {sign}", replace(asked, demand=replace(demand, **more)), 1.0
    for sign, factor in factors.items():
        yield f"prices {sign}", asked, factor
    for name, level in {"ttft": asked.ttft, "tpot": asked.tpot}.items():
        for sign, factor in factors.items():
            moved = replace(level, seconds=level.seconds * factor)
            yield f"{name.upper()} {sign}", replace(asked, **{name: moved}), 1.0


def _sensitivity(sizer: Sizer, best: FleetPlan) -> list[dict[str, Any]]:
    """The fleet of the same kinds of workers and units that another demand, or targets a fifth
    tighter or looser, would take: seconds and USD by name; only the change, where none does."""
    asked, found = sizer.asked, []
    for name, one, factor in [("as planned", asked, 1.0), *_variants(asked)]:
        other, row = sizer.asking(one), dict[str, Any](change=name)
        made = best if one == asked else other.again(best)
        if made is not None:
            millions = made.millions(other.requests).items()
            row |= {
                "ttft": made.prediction.ttft_asked,
                "tpot": made.prediction.tpot_asked,
                "workers": made.fleet.workers,
                "units": made.fleet.units,
                "dollars_a_month": made.month * factor,
                "dollars_per_million_tokens": {side: usd * factor for side, usd in millions},
            }
        found.append(row)
    return found
