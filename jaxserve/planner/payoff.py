"""`plan map`: the cheapest AFD, EP and TP over models, hardware, contexts and TPOTs.

Every case is two searches: of AFD on the mix, and of colocation on either kind.
"""

import argparse
import contextlib
import multiprocessing
import os
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import msgspec

from jaxserve.config.topology import PlannedMode
from jaxserve.errors import ConfigError
from jaxserve.planner import view
from jaxserve.planner.assumptions import Assumptions, Formats
from jaxserve.planner.hardware import Hardware, load_hardware
from jaxserve.planner.layouts import MODES, Target
from jaxserve.planner.models import CostModel, load_model
from jaxserve.planner.noise import Skew, read_skew
from jaxserve.planner.options import assumptions, positions, seconds, tokens
from jaxserve.planner.search import Plan, Searcher
from jaxserve.planner.search_view import DECODE_ONLY
from jaxserve.planner.stages import Calculator

LEGEND = (
    "the cheapest mode, its USD a million tokens, and x what AFD costs over the cheaper of EP and "
    "TP; -: nothing meets the TPOT"
)
SMALL = {
    "models": ["step3", "deepseek-v3"],
    "hardware": ["h800", "h20+h800"],
    "contexts": ["4K", "32K"],
    "tpots": ["50ms", "100ms"],
}
FULL = {
    "models": ["step3", "deepseek-v3", "kimi-k2", "qwen3-235b-a22b", "qwen3-32b"],
    "hardware": [
        *("h20", "h100", "h200", "h800", "b200", "v5p", "v6e", "v7x"),
        *("h20+h100", "h20+h800", "h20+b200", "h200+h100", "v6e+v7x", "v5p+v6e"),
    ],
    "contexts": ["2K", "8K", "16K", "32K"],
    "tpots": ["25ms", "50ms", "100ms"],
}
"""480 cases on one kind of hardware, and 360 on two."""


class Mix(NamedTuple):
    """Hardware by name for the roles; a colocated deployment may take either."""

    name: str
    attention: Mapping[str, Hardware]
    ffn: Mapping[str, Hardware]


class Case(NamedTuple):
    """A point of the map."""

    model: str
    mix: str
    context: int
    tpot: float
    """Seconds."""
    best: Mapping[PlannedMode, Plan]
    """The cheapest plan of each mode that meets the TPOT."""

    @property
    def colocated(self) -> Plan | None:
        """The cheaper of EP and TP."""
        found = [self.best[mode] for mode in ("ep", "tp") if mode in self.best]
        return min(found, key=lambda plan: plan.dollars, default=None)

    @property
    def ratio(self) -> float | None:
        """Cost of AFD over that of colocation; None: one of them does not meet the TPOT."""
        afd, colocated = self.best.get("afd"), self.colocated
        return afd.dollars / colocated.dollars if afd and colocated else None

    @property
    def winner(self) -> PlannedMode | None:
        """The cheapest mode; None: nothing meets the TPOT."""
        return min(self.best, key=lambda mode: self.best[mode].dollars, default=None)


class Part(NamedTuple):
    """A model on a mix, which one process works out."""

    name: str
    model: CostModel
    mix: Mix
    contexts: Sequence[int]
    tpots: Sequence[float]
    formats: Formats
    assumed: Assumptions
    skew: Skew | None = None
    most: int = 64
    """Devices of a deployment, at most."""

    def cases(self) -> list[Case]:
        """Returns the cheapest plan of each mode for each context and TPOT."""
        return [
            Case(self.name, self.mix.name, context, tpot, self._best(context, tpot))
            for context in self.contexts
            for tpot in self.tpots
        ]

    def _best(self, context: int, tpot: float) -> dict[PlannedMode, Plan]:
        attention, ffn = self.mix.attention, self.mix.ffn
        both = {**attention, **ffn}
        calculator = Calculator(self.model, context, self.formats, self.assumed)
        apart = Searcher(calculator, attention, ffn, skew=self.skew)
        together = Searcher(calculator, both, both, skew=self.skew)
        target = Target(tpot=tpot, max_devices=self.most, modes=("afd",))
        colocated = msgspec.structs.replace(target, modes=("ep", "tp"))
        best: dict[PlannedMode, Plan] = {}
        for plan in [*apart.search(target).plans, *together.search(colocated).plans]:
            best.setdefault(plan.layout.mode, plan)
        return best


def map_rows(found: Sequence[Case]) -> list[list[str]]:
    """A heading, and a row a model, mix and context, with a column a TPOT: the cheapest mode, its
    USD a million tokens, and what AFD costs over colocation."""
    tpots = sorted({case.tpot for case in found})
    rows = [["", "hardware", "context", *(f"{tpot * 1e3:g} ms" for tpot in tpots)]]
    places: dict[tuple[str, str, int], dict[float, Case]] = {}
    for case in found:
        places.setdefault((case.model, case.mix, case.context), {})[case.tpot] = case
    for (model, mix, context), row in places.items():
        cells = [_cell(row[tpot]) for tpot in tpots]
        rows.append([model, mix, f"{context // 1024}K", *cells])
    return rows


def _cell(case: Case) -> str:
    if case.winner is None:
        return "-"
    text = f"{case.winner} {case.best[case.winner].dollars:.3f}"
    return text if case.ratio is None else f"{text} x{case.ratio:.2f}"


def mixes_that_pay(found: Sequence[Case]) -> list[tuple[Case, float]]:
    """Cases of two kinds of hardware in which AFD on both costs less than every mode on either
    alone, and the part of that cost. Both kinds have to be in the map alone, too."""
    alone: dict[tuple[str, int, float, str], float] = {}
    for case in found:
        if case.winner is not None:
            place = case.model, case.context, case.tpot, case.mix
            alone[place] = case.best[case.winner].dollars
    pays = []
    for case in found:
        kinds = case.mix.split("+")
        others = [alone.get((case.model, case.context, case.tpot, kind)) for kind in kinds]
        best = min((cost for cost in others if cost is not None), default=None)
        if len(kinds) == 2 and "afd" in case.best and best is not None:
            pays.append((case, case.best["afd"].dollars / best))
    return sorted((one for one in pays if one[1] < 1), key=lambda one: one[1])


def map_summary(found: Sequence[Case]) -> list[str]:
    """Says which mode is the cheapest how often, what AFD costs over colocation, and which stages
    set AFD's pace."""
    won = Counter(case.winner for case in found)
    counts = ", ".join(f"{name} {won[mode]}" for mode, name in MODES.items())
    lines = [f"the cheapest of {len(found)} cases: {counts}; nothing meets the TPOT: {won[None]}"]
    ratios = [case.ratio for case in found if case.ratio is not None]
    if ratios:
        lines.append(
            f"cost of AFD over colocation: least {min(ratios):.2f}, median "
            f"{statistics.median(ratios):.2f}, most {max(ratios):.2f}"
        )
    slowest = Counter(": ".join(case.best["afd"].slowest) for case in found if "afd" in case.best)
    if slowest:
        stages = ", ".join(f"{stage} {count}" for stage, count in slowest.most_common())
        lines.append(f"AFD's slowest stage, and what bounds it: {stages}")
    return lines


def run(options: argparse.Namespace) -> None:
    """Evaluates and shows.

    Raises:
      ConfigError: an option is wrong.
    """
    told = FULL if options.full else SMALL
    contexts = options.contexts or list(map(tokens, told["contexts"]))
    tpots = options.tpots or list(map(seconds, told["tpots"]))
    assumed = assumptions(options.assume)
    skew = read_skew(options.skew) if options.skew is not None else None
    mixes = [_mix(name, options) for name in options.hardware or told["hardware"]]
    parts = []
    for name in options.models or told["models"]:
        model, longest = load_model(name, options.configs), positions(name, options.configs)
        if longest is not None and max(contexts) > longest:
            raise ConfigError(f"--contexts {max(contexts)}: {name} has {longest} positions")
        for mix in mixes:
            formats, most = _formats(mix, options), options.max_devices
            parts.append(Part(name, model, mix, contexts, tpots, formats, assumed, skew, most))
    found = _evaluate(parts, options.jobs or os.cpu_count() or 1)
    pays = [
        f"{case.model} on {case.mix}, {case.context // 1024}K, {case.tpot * 1e3:g} ms: "
        f"x{ratio:.2f} of the cheapest on either alone"
        for case, ratio in mixes_that_pay(found)
    ]
    notes = [
        DECODE_ONLY,
        LEGEND,
        *map_summary(found),
        *(["mixes that pay:", *pays] if pays else []),
    ]
    shown = [view.Part(rows=map_rows(found), lines=notes)]
    tree = {"scope": DECODE_ONLY, "cases": [_tree(case) for case in found]}
    view.show(options, view.Report("Where AFD, EP and TP are the cheapest", shown, tree))


def _evaluate(parts: Sequence[Part], jobs: int) -> list[Case]:
    """The cases of all parts, in processes of their own if there are several."""
    found: list[Case] = []
    with contextlib.ExitStack() as stack:
        results: Iterator[list[Case]] = map(Part.cases, parts)
        if min(jobs, len(parts)) > 1:
            spawn = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(min(jobs, len(parts)), spawn)
            results = stack.enter_context(pool).map(Part.cases, parts)
        for part, own in zip(parts, results, strict=True):
            print(f"{part.name} on {part.mix.name}", file=sys.stderr)
            found += own
    return found


def _tree(case: Case) -> dict[str, object]:
    return {
        "model": case.model,
        "hardware": case.mix,
        "context": case.context,
        "tpot_seconds": case.tpot,
        "winner": case.winner,
        "afd_over_colocated": case.ratio,
        "best": {
            mode: {
                **msgspec.to_builtins(plan.layout),
                "batch": plan.batch,
                "tpot_seconds": plan.tpot,
                "dollars_per_million_tokens": plan.dollars,
                "slowest": plan.slowest,
            }
            for mode, plan in case.best.items()
        },
    }


def _mix(name: str, options: argparse.Namespace) -> Mix:
    """Reads `h800`, or `h20+h800`: attention on the one, FFN on the other."""
    attention, _, ffn = name.lower().partition("+")
    own = dict(options.price)
    first = load_hardware(attention, own, options.configs)
    second = load_hardware(ffn, own, options.configs) if ffn else first
    return Mix(name.lower(), {attention: first}, {ffn or attention: second})


def _formats(mix: Mix, options: argparse.Namespace) -> Formats:
    """FP8, or INT8 where some of the hardware has no FP8."""
    all_fp8 = all(each.stores("fp8") for each in (*mix.attention.values(), *mix.ffn.values()))
    name = "fp8" if all_fp8 else "int8"
    compute = options.compute if all_fp8 or options.compute != "fp8" else "auto"
    tree = {**dict.fromkeys(("weights", "cache", "dispatch"), name), "compute": compute}
    return msgspec.convert({**tree, "core": options.core}, Formats)
