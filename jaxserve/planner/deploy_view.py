"""A plan of a whole deployment for a terminal, for programs and as a page.

Called by `fleet/deploy_command.py`.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from jaxserve.planner.assumptions import measured_speed
from jaxserve.planner.deploy import Sizer
from jaxserve.planner.deploy_fleet import Asked, FleetPlan, Planned
from jaxserve.planner.layouts import MODES
from jaxserve.planner.results import FleetResult
from jaxserve.planner.search_view import balance_text, front_svg, plan_tree
from jaxserve.planner.view import Report, declared


def deploy_report(
    title: str,
    sizer: Sizer,
    planned: Planned,
    prices: list[str],
    of_file: FleetResult | None,
    command: str,
) -> Report:
    """The plan with its latency, load, cost, sensitivity and alternatives.

    Args:
      prices: one line per kind of hardware.
      of_file: times from the simulation of the written file.
      command: `plan simulate` command for the written file; empty: no file was written.
    """
    made, asked = planned.best, sizer.asked
    fleet, demand, requests = made.fleet, asked.demand, sizer.requests
    taken = max(1, round(fleet.taken))
    axes = f"Decode alone: cost against TPOT, {sizer.context:,} tokens"
    pace = 0.0 if made.prediction.tpot is None else made.prediction.tpot.mean
    # Whole pages cross, without the prompt's last token.
    crossing = float(((requests.prompt - 1) // asked.page * asked.page).mean())
    sensitivity = _sensitivity(sizer, made)
    parts = declared(
        "deploy",
        title=title,
        made=made,
        asked=asked,
        fleet=fleet,
        unit=fleet.unit.layout,
        worker=fleet.worker.layout,
        mode=MODES[fleet.unit.layout.mode],
        roles=_roles(made),
        latency=_latency(asked, made.prediction, of_file),
        found=made.prediction,
        demand=demand,
        requests=requests,
        pace=pace,
        sequences=demand.rate * float(requests.output.mean()) * pace,
        slots=fleet.slots * fleet.unit.lanes,
        link=made.link,
        crossing=crossing * made.link.token_bytes,
        millions=made.millions(requests),
        latent=any(group.latent for group in sizer.model.attention),
        assumed=sizer.searcher.calculator.assumed,
        balance=balance_text(fleet.unit.pace.longest(taken), fleet.unit.layout, taken),
        measured=measured_speed().systems,
        prices=prices,
        sensitivity=sensitivity,
        reasons=planned.reasons.items(),
        picture=front_svg(axes, planned.found, asked.target, fleet.unit.plan),
        command=command,
    )
    tree = _tree(sizer, planned) | {
        "of_file": of_file,
        "prices": prices,
        "sensitivity": sensitivity,
        "simulate": command,
    }
    return Report(title, parts, tree)


def _roles(made: FleetPlan) -> list[dict[str, Any]]:
    """The roles' devices and prices, and their sums at the end."""
    rows: list[dict[str, Any]] = [
        role._asdict()
        | {"hardware": role.hardware.name, "chips": role.chips, "dollars_an_hour": role.dollars}
        for role in made.roles
    ]
    numbers = ("devices", "spare_hosts", "chips", "dollars_an_hour")
    return [*rows, {"name": "together"} | {n: sum(row[n] for row in rows) for n in numbers}]


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


def _tree(sizer: Sizer, planned: Planned) -> dict[str, Any]:
    """The plan for programs: seconds, bytes, USD."""
    made, asked, fleet = planned.best, sizer.asked, planned.best.fleet
    return {
        "demand": asked.demand,
        "targets": {"ttft": asked.ttft.text, "tpot": asked.tpot.text},
        "roles": _roles(made)[:-1],
        "prefill": {
            "workers": fleet.workers,
            "chunk": fleet.worker.chunk,
            "layout": fleet.worker.layout,
        },
        "decode": {
            "units": fleet.units,
            "slots": fleet.slots,
            "plan": plan_tree(sizer.searcher.with_memory(fleet.unit.plan)),
        },
        "link": made.link,
        "prediction": made.prediction,
        "dollars_a_month": made.month,
        "dollars_per_million_tokens": made.millions(sizer.requests),
        "measured_over_predicted": measured_speed().systems._asdict(),
        "alternatives": planned.reasons,
    }
