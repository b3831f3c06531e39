"""A plan of a whole deployment for a terminal, for programs and as a page.

Called by `fleet/deploy_command.py`.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from jaxserve.config.model import MLA
from jaxserve.planner.deploy import Sizer
from jaxserve.planner.deploy_fleet import Asked, Deployment, Planned
from jaxserve.planner.hardware import MONTH
from jaxserve.planner.layouts import MODES
from jaxserve.planner.results import FleetResult, Times
from jaxserve.planner.search_view import front_svg, plan_tree
from jaxserve.planner.view import Part, Report, times_row

PREDICTED = "Stage times by rooflines, requests in simulated time; nothing here was measured."
UNCHANGED = "Fleets of the same kinds of workers and units, sized anew for each row."


class Shown(NamedTuple):
    """Contents of the report of `plan deploy`.

    Attributes:
      prices: one line per kind of hardware.
      of_file: times from the simulation of the written file.
      command: `plan simulate` command for the written file; empty: no file was written.
    """

    title: str
    asked: Asked
    sizer: Sizer
    planned: Planned
    prices: list[str]
    of_file: FleetResult | None
    command: str


def deploy_report(shown: Shown) -> Report:
    """The plan with its latency, load, cost, sensitivity and alternatives."""
    made, asked = shown.planned.best, shown.asked
    title = f"Decode alone: cost against TPOT, {shown.sizer.context:,} tokens"
    picture = front_svg(title, shown.planned.found, asked.target, made.fleet.unit.plan)
    command = [f"in simulated time: {shown.command}"] if shown.command else []
    sensitivity = _sensitivity(shown)
    reasons = [["layout", ""], *map(list, shown.planned.reasons.items())]
    parts = [
        Part(shown.title, _role_rows(made)),
        Part("Latency", _latency_rows(shown)),
        Part("Load and cost", lines=_facts(shown)),
        Part(f"Sensitivity. {UNCHANGED}", _sensitivity_rows(asked, sensitivity)),
        Part("What else was looked at", reasons),
        Part("What decode units cost", pictures=[picture], aside=True),
        Part(lines=[PREDICTED, *command]),
    ]
    return Report(shown.title, parts, _tree(shown, sensitivity))


def _role_rows(made: Deployment) -> list[list[str]]:
    fleet = made.fleet
    worker, unit = fleet.worker.layout, fleet.unit.layout
    meshes = f"{fleet.units} x (dp {unit.dp} tp {unit.tp})"
    chunks = f"chunks of {fleet.worker.chunk} a group"
    parts = {
        "prefill": f"{fleet.workers} x (dp {worker.dp} tp {worker.tp}), {chunks}",
        "attention": f"{meshes}, {unit.lanes} lanes of {fleet.slots}",
        "ffn": f"{fleet.units} x (ep {unit.ep} tp {unit.ffn_tp})",
        "decode": f"{meshes}, {MODES[unit.mode]}, {fleet.slots} a group",
    }
    parts["decode"] += "" if fleet.workers else ", prompts, too"
    rows = [["", "workers", "hardware", "devices", "spare servers", "chips", "USD an hour"]]
    rows[0].append("USD a month")
    numbers = [(role.devices, role.spare_hosts, role.chips, role.dollars) for role in made.roles]
    sums = tuple(map(sum, zip(*numbers, strict=True)))
    heads = [[role.name, parts[role.name], role.hardware.name] for role in made.roles]
    for head, each in zip([*heads, ["together", "", ""]], [*numbers, sums], strict=True):
        devices, spares, chips, dollars = each
        money = [f"{dollars:,.2f}", f"{dollars * MONTH:,.0f}"]
        rows.append([*head, str(devices), str(spares), f"{chips:g}", *money])
    return rows


def _latency_rows(shown: Shown) -> list[list[str]]:
    """TTFT and TPOT as sized, and as the written file's simulation gave them."""
    asked, found, of_file = shown.asked, shown.planned.best.prediction, shown.of_file
    rows = [["ms", *Times.__struct_fields__, "asked for", "there"]]

    for name, level in {"ttft": asked.ttft, "tpot": asked.tpot}.items():
        for label, result in ((name.upper(), found), (f"  {name.upper()} of the file", of_file)):
            if result is not None:
                there = f"{getattr(result, f'{name}_asked') * 1e3:.1f}"
                rows.append([*times_row(label, getattr(result, name), 1), level.text, there])
            waits = found.waits if label == "TTFT" else {}
            rows += [
                [*times_row(f"  wait for {part}", times, 1), "", ""]
                for part, times in waits.items()
                if times is not None
            ]
    return rows


def _facts(shown: Shown) -> list[str]:
    """Load, hand-off, spares, and what it costs."""
    made, demand, sizer = shown.planned.best, shown.asked.demand, shown.sizer
    found, fleet, link = made.prediction, made.fleet, made.link
    requests, layout = sizer.requests(demand), fleet.unit.layout
    millions = made.millions(requests)
    pace = 0.0 if found.tpot is None else found.tpot.mean
    sequences = demand.rate * float(requests.output.mean()) * pace
    slots = fleet.slots * fleet.unit.lanes
    busy = ", ".join(f"{role} {share:.0%}" for role, share in found.busy.items())
    lines = [
        f"simulated: {found.finished} requests that count, {found.refused} refused; busy: {busy}",
        f"decoding at a time (Little's law): {demand.rate:g} a second x "
        f"{requests.output.mean():,.0f} tokens x {pace * 1e3:.1f} ms = {sequences:,.0f} sequences, "
        f"{sequences / (fleet.units * slots):.0%} of {fleet.units} x {slots:,} slots, "
        f"{requests.context:,.0f} tokens each",
    ]
    if fleet.workers:
        # Whole pages cross, without the prompt's last token.
        tokens = float(((requests.prompt - 1) // shown.asked.page * shown.asked.page).mean())
        crossing = tokens * link.token_bytes
        lines.append(
            f"KV hand-off: {link.token_bytes / 1e3:.1f} KB a token, {crossing / 1e6:.1f} MB a "
            f"request, {demand.rate * crossing / 1e9:.2f} GB/s in all; "
            f"{link.bytes_per_second / 1e9:.0f} GB/s a worker"
        )
    lines += [
        f"drafts: {layout.drafts} a step, {fleet.unit.plan.tokens_a_step:.2f} tokens; redundant "
        f"slots of experts: {layout.redundant_slots} a rank (prefill "
        f"{fleet.worker.layout.redundant_slots})",
        f"spares: {shown.asked.spares.text}",
        f"USD: {made.month:,.0f} a month; {millions['in']:.3f} a million tokens in (prefill, found "
        f"ones included), {millions['out']:.3f} a million out (decoding), at this rate around the "
        "clock",
    ]
    assumed = sizer.searcher.calculator.assumed
    if any(isinstance(group.spec, MLA) for group in sizer.model.attention):
        form = (
            "keys and values expanded everywhere, which this engine does within a chunk alone"
            if assumed.expanded
            else "as this engine runs them, expanded within a chunk and absorbed before it "
            "(`--assume expanded=true`: expanded everywhere)"
        )
        lines.append(f"prompts of latent attention: {form}; `serve --check` names missing kernels")
    if beyond := assumed.beyond_engine:
        lines.append(f"assumed, and not what this engine does: {', '.join(beyond)}")
    return lines + shown.prices


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


def _sensitivity(shown: Shown) -> list[dict[str, Any]]:
    """The fleet of the same kinds of workers and units that another demand, or targets a fifth
    tighter or looser, would take: seconds and USD by name; only the change, where none does."""
    asked, best, found = shown.asked, shown.planned.best, []
    for name, one, factor in [("as planned", asked, 1.0), *_variants(asked)]:
        sizer, row = shown.sizer.asking(one), dict[str, Any](change=name)
        made = best if one == asked else sizer.again(best, one.demand)
        if made is not None:
            millions = made.millions(sizer.requests(one.demand)).items()
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


def _sensitivity_rows(asked: Asked, found: list[dict[str, Any]]) -> list[list[str]]:
    rows = [["", f"TTFT p{asked.ttft.percent:g} ms", f"TPOT p{asked.tpot.percent:g} ms"]]
    rows[0] += ["workers", "units", "USD a month", "USD/M in", "USD/M out"]
    for one in found:
        if "ttft" not in one:
            rows.append([one["change"], "none meet it", *[""] * 6])
            continue
        row = [one["change"], f"{one['ttft'] * 1e3:.0f}", f"{one['tpot'] * 1e3:.1f}"]
        row += [str(one["workers"]), str(one["units"]), f"{one['dollars_a_month']:,.0f}"]
        rows.append([*row, *(f"{n:.3f}" for n in one["dollars_per_million_tokens"].values())])
    return rows


def _tree(shown: Shown, sensitivity: list[dict[str, Any]]) -> dict[str, Any]:
    """The plan for programs: seconds, bytes, USD."""
    made, asked, fleet = shown.planned.best, shown.asked, shown.planned.best.fleet
    return {
        "demand": asked.demand,
        "targets": {"ttft": asked.ttft.text, "tpot": asked.tpot.text},
        "roles": [
            {
                **role._asdict(),
                "hardware": role.hardware.name,
                "chips": role.chips,
                "dollars_an_hour": role.dollars,
            }
            for role in made.roles
        ],
        "prefill": {
            "workers": fleet.workers,
            "chunk": fleet.worker.chunk,
            "layout": fleet.worker.layout,
        },
        "decode": {
            "units": fleet.units,
            "slots": fleet.slots,
            "plan": plan_tree(fleet.unit.plan),
        },
        "link": made.link,
        "prediction": made.prediction,
        "of_file": shown.of_file,
        "dollars_a_month": made.month,
        "dollars_per_million_tokens": made.millions(shown.sizer.requests(asked.demand)),
        "prices": shown.prices,
        "sensitivity": sensitivity,
        "alternatives": shown.planned.reasons,
        "simulate": shown.command,
    }
