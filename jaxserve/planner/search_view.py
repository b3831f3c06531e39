"""`plan search`: the cheapest layouts that meet a target, and their front of cost against TPOT.

`plan map`: the cheapest AFD, EP and TP over models, hardware, contexts and TPOTs, and who should
use AFD. A case is two searches: of AFD on the mix, and of colocation on either kind.
"""

import argparse
import contextlib
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
from jaxserve.planner.search import Found, Plan, Searcher, front, why_not
from jaxserve.planner.view import PagePart, Report, Series, chart, declared, show

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
            parts.append(PagePart(MODES[mode], lines=["nothing meets the target"]))
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
        """Costs of EP and of TP."""
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


class MapPart(NamedTuple):
    """A model on a mix, which one process works out.

    Attributes:
      mix: `h800`, or `h20+h800`: attention on the one, FFN on the other.
    """

    options: argparse.Namespace
    model: str
    mix: str

    def cases(self) -> list[Case]:
        """Returns the cheapest plan of each mode for each context and TPOT.

        Raises:
          ConfigError: an option is wrong.
        """
        options = argparse.Namespace(**{**vars(self.options), "model": self.model})
        names = self.mix.partition("+")
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
                found.append(Case(self.model, self.mix, context, tpot, best))
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


def map_parts(found: Sequence[Case]) -> list[PagePart]:
    """Returns the report of the cases: advice, the cases, and how often which mode is cheapest."""
    ratios = sorted(case.ratio for case in found if case.ratio)
    told = {
        "ratios": ratios,
        "median": statistics.median(ratios) if ratios else None,
        "won": {name: [case.winner for case in found].count(mode) for mode, name in MODES.items()},
        "lost": [case.winner for case in found].count(None),
    }
    return declared("map", scope=DECODE_ONLY, cases=found, advised=advised(found), **told)


def run_map(options: argparse.Namespace) -> None:
    """Evaluates and shows.

    Raises:
      ConfigError: an option is wrong.
    """
    for name, values in TABLE["commands"]["map"]["full" if options.full else "some"].items():
        setattr(options, name, getattr(options, name) or values)
    for model in options.models:
        check_positions(model, options.configs, contexts=max(options.contexts))
    sent = argparse.Namespace(**{**vars(options), "run": None})  # functions cannot be sent
    check_prices(options, {name for mix in options.hardware for name in mix.split("+")})
    names = itertools.product(options.models, options.hardware)
    parts = [MapPart(sent, model, mix) for model, mix in names]
    found = _evaluate(parts, options.jobs or os.cpu_count() or 1)
    tree = {"scope": DECODE_ONLY, "cases": [_case_tree(case) for case in found]}
    show(options, Report("Where AFD, EP and TP are the cheapest", map_parts(found), tree))


def _evaluate(parts: Sequence[MapPart], jobs: int) -> list[Case]:
    found: list[Case] = []
    with contextlib.ExitStack() as stack:
        results: Iterator[list[Case]] = map(MapPart.cases, parts)
        if (jobs := min(jobs, len(parts))) > 1:
            pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))
            results = stack.enter_context(pool).map(MapPart.cases, parts)
        for part, own in zip(parts, results, strict=True):
            print(f"{part.model} on {part.mix}", file=sys.stderr)
            found += own
    return found


def _case_tree(case: Case) -> dict[str, object]:
    return {
        "model": case.model,
        "hardware": case.mix,
        "context": case.context,
        "tpot_seconds": case.tpot,
        "winner": case.winner,
        "afd_over_colocated": case.ratio,
        "likely": case.likely,
        "best": {mode: plan_tree(plan) for mode, plan in case.best.items()},
    }
