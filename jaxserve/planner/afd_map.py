"""`plan map`: the cheapest AFD, EP and TP over models, hardware, contexts and TPOTs, and who should
use AFD.

A case is two searches: of AFD on the mix, and of colocation on either kind.
"""

import argparse
import contextlib
import itertools
import multiprocessing
import os
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from jaxserve.config.topology import PlannedMode
from jaxserve.planner.layouts import MODES
from jaxserve.planner.measured_speed import measured_speed
from jaxserve.planner.options import (
    check_positions,
    read_formats,
    read_hardware,
    read_searcher,
    read_target,
)
from jaxserve.planner.search import Plan, Searcher
from jaxserve.planner.search_view import DECODE_ONLY, plan_tree
from jaxserve.planner.view import Part, Report, show

MAP_LEGEND = (
    "the cheapest mode, its USD a million tokens, and x what AFD costs over the cheaper of EP and "
    "TP (p10 to p90, if both are as fast beside predictions as published systems were); -: nothing "
    "meets the TPOT"
)
ADVICE = "Who should use AFD: cases in which it costs less, and the one in which it costs least"
SMALL = {
    "models": ["step3", "deepseek-v3"],
    "hardware": ["h800", "h20+h800"],
    "contexts": [4096, 32768],
    "tpots": [0.05, 0.1],
}
FULL = {
    "models": ["step3", "deepseek-v3", "kimi-k2", "qwen3-235b-a22b", "qwen3-32b"],
    "hardware": [
        *("h20", "h100", "h200", "h800", "b200", "v5p", "v6e", "v7x"),
        *("h20+h100", "h20+h800", "h20+b200", "h200+h100", "v6e+v7x", "v5p+v6e"),
    ],
    "contexts": [2048, 8192, 16384, 32768],
    "tpots": [0.025, 0.05, 0.1],
}
"""480 cases on one kind of hardware, and 360 on two."""


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
    def over(self) -> str:
        """The ratio and its range, as text; empty if the ratio is not known."""
        ends = self.likely
        return f"x{self.ratio:.2f} ({ends[0]:.2f} to {ends[1]:.2f})" if ends else ""

    @property
    def winner(self) -> PlannedMode | None:
        """The cheapest mode; None: nothing meets the TPOT."""
        return min(self.best, key=lambda mode: self.best[mode].dollars, default=None)

    @property
    def text(self) -> str:
        """The winner, its cost, and what AFD costs over colocation; "-" if nothing meets the
        TPOT."""
        if self.winner is None:
            return "-"
        return f"{self.winner} {self.best[self.winner].dollars:.3f} {self.over}".rstrip()


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


def map_rows(found: Sequence[Case]) -> list[list[str]]:
    """A heading, and a row for each model, mix and context, with a column a TPOT."""
    tpots = sorted({case.tpot for case in found})
    rows = [["", "hardware", "context", *(f"{tpot * 1e3:g} ms" for tpot in tpots)]]
    places: dict[tuple[str, str, int], dict[float, Case]] = {}
    for case in found:
        places.setdefault(case[:3], {})[case.tpot] = case
    for (model, mix, context), row in places.items():
        rows.append([model, mix, f"{context // 1024}K", *(row[tpot].text for tpot in tpots)])
    return rows


def advice_rows(found: Sequence[Case]) -> list[list[str]]:
    """A heading, and a row for each model with a column a TPOT: how often AFD is the cheapest, of
    the cases that AFD and colocation both meet; the hardware and context in which it costs least
    over colocation, and what sets its pace there."""
    tpots = sorted({case.tpot for case in found})
    rows = [["", *(f"{tpot * 1e3:g} ms" for tpot in tpots)]]
    for model in dict.fromkeys(case.model for case in found):
        row = [model]
        for tpot in tpots:
            own = [case for case in found if (case.model, case.tpot) == (model, tpot)]
            both = [(case.ratio, case) for case in own if case.ratio is not None]
            text = f"{sum(ratio < 1 for ratio, _ in both)} of {len(both)}"
            if both:
                _, best = min(both, key=lambda one: one[0])
                pace = ": ".join(best.best["afd"].slowest)
                text += f"; {best.over} on {best.mix}, {best.context // 1024}K, {pace}"
            row.append(text)
        rows.append(row)
    return rows


def map_summary(found: Sequence[Case]) -> str:
    """Says which mode is the cheapest how often, and what AFD costs over colocation."""
    won = Counter(case.winner for case in found)
    counts = ", ".join(f"{name} {won[mode]}" for mode, name in MODES.items())
    told = f"the cheapest of {len(found)} cases: {counts}; nothing meets the TPOT: {won[None]}"
    ratios = sorted(case.ratio for case in found if case.ratio is not None)
    if ratios:
        ends = (
            f"least {ratios[0]:.2f}, median {statistics.median(ratios):.2f}, most {ratios[-1]:.2f}"
        )
        told += f"; cost of AFD over colocation: {ends}"
    return told


def run(options: argparse.Namespace) -> None:
    """Evaluates and shows.

    Raises:
      ConfigError: an option is wrong.
    """
    for name, values in (FULL if options.full else SMALL).items():
        setattr(options, name, getattr(options, name) or values)
    for model in options.models:
        check_positions(model, options.configs, contexts=max(options.contexts))
    sent = argparse.Namespace(**{**vars(options), "run": None})  # functions cannot be sent
    names = itertools.product(options.models, map(str.lower, options.hardware))
    parts = [MapPart(sent, model, mix) for model, mix in names]
    found = _evaluate(parts, options.jobs or os.cpu_count() or 1)
    notes = [DECODE_ONLY, MAP_LEGEND, map_summary(found)]
    shown = [Part(ADVICE, advice_rows(found)), Part(rows=map_rows(found), lines=notes)]
    tree = {"scope": DECODE_ONLY, "cases": [_case_tree(case) for case in found]}
    show(options, Report("Where AFD, EP and TP are the cheapest", shown, tree))


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
