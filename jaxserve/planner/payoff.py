"""When AFD pays: the cheapest AFD, EP and TP over models, hardware, contexts and TPOTs.

Called by `plan.py map`. A search finds the largest batch of every layout within one TPOT; here each
layout is evaluated once at batches a half apart, and every TPOT takes the cheapest of those that
meet it, so costs are those of a search within some percent.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from jaxserve.config.topology import PlannedMode
from jaxserve.planner.assumptions import Assumptions, Formats
from jaxserve.planner.hardware import Hardware
from jaxserve.planner.layouts import Target
from jaxserve.planner.models import CostModel
from jaxserve.planner.search import Plan, Searcher
from jaxserve.planner.skew import Skew
from jaxserve.planner.stages import Calculator

MODES: tuple[PlannedMode, ...] = ("afd", "ep", "tp")


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


def cases(
    model: str,
    costs: CostModel,
    mix: Mix,
    contexts: Sequence[int],
    tpots: Sequence[float],
    formats: Formats,
    assumed: Assumptions,
    skew: Skew | None = None,
    most: int = 64,
) -> Iterator[Case]:
    """The cheapest plans of a model on a mix.

    Args:
      most: devices of a deployment.
    """
    both = {**mix.attention, **mix.ffn}
    for context in contexts:
        calculator = Calculator(costs, context, formats, assumed)
        afd = Searcher(calculator, mix.attention, mix.ffn, skew=skew)
        same = Searcher(calculator, both, both, skew=skew)
        slowest = max(tpots)
        plans = [
            *_points(afd, Target(tpot=slowest, max_devices=most, modes=("afd",))),
            *_points(same, Target(tpot=slowest, max_devices=most, modes=("ep", "tp"))),
        ]
        for tpot in tpots:
            best: dict[PlannedMode, Plan] = {}
            for plan in plans:
                mode = plan.layout.mode
                cheaper = mode not in best or plan.dollars < best[mode].dollars
                if plan.tpot <= tpot and cheaper:
                    best[mode] = plan
            yield Case(model, mix.name, context, tpot, best)


def _points(searcher: Searcher, target: Target) -> Iterator[Plan]:
    """Every layout that fits, at batches a half apart, as long as it meets the target."""
    for layout in searcher.layouts(target):
        room = searcher.room(layout)
        batch = min(room, 4)
        while batch:
            plan = searcher.evaluate(layout, batch)
            if plan.tpot > target.tpot:
                break
            yield plan
            batch = min(room, batch + (batch + 1) // 2) if batch < room else 0


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


def tally_rows(found: Sequence[Case], name: str, key: Callable[[Case], str]) -> list[list[str]]:
    """Cases by something: how many each mode wins, the median of what AFD costs over colocation,
    and the stage that most often sets AFD's pace."""
    rows = [[name, "cases", *MODES, "none", "AFD / other", "AFD's slowest stage"]]
    groups: dict[str, list[Case]] = {}
    for case in found:
        groups.setdefault(key(case), []).append(case)
    for group, own in groups.items():
        won = Counter(case.winner for case in own)
        ratios = [case.ratio for case in own if case.ratio is not None]
        slowest = Counter(": ".join(case.best["afd"].slowest) for case in own if "afd" in case.best)
        rows.append(
            [
                group,
                str(len(own)),
                *(str(won[mode]) for mode in (*MODES, None)),
                f"{statistics.median(ratios):.2f}" if ratios else "-",
                ", ".join(f"{stage} {count}" for stage, count in slowest.most_common(2)),
            ]
        )
    return rows


def tallies(found: Sequence[Case]) -> list[list[list[str]]]:
    """By model, hardware, context and TPOT."""
    return [
        tally_rows(found, "model", lambda case: case.model),
        tally_rows(found, "hardware", lambda case: case.mix),
        tally_rows(found, "context", lambda case: f"{case.context // 1024}K"),
        tally_rows(found, "TPOT", lambda case: f"{case.tpot * 1e3:g} ms"),
    ]


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


def map_summary(found: Sequence[Case]) -> str:
    """Of how many cases AFD is the cheapest, and the median of its cost over colocation."""
    ratios = sorted(case.ratio for case in found if case.ratio is not None)
    met = [case for case in found if case.winner is not None]
    won = sum(case.winner == "afd" for case in met)
    alone = sum(case.winner == "afd" and case.colocated is None for case in met)
    lines = [f"AFD is the cheapest of {won} of {len(met)} cases, in {alone} of them alone"]
    if ratios:
        lines.append(
            f"cost of AFD over colocation: least {ratios[0]:.2f}, median "
            f"{ratios[len(ratios) // 2]:.2f}, most {ratios[-1]:.2f}"
        )
    return "; ".join(lines)


def map_tree(found: Sequence[Case]) -> list[dict[str, object]]:
    """For `--json`, but for what it is about."""
    return [
        {
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
        for case in found
    ]
