"""A plan of a whole deployment for a terminal, for programs and as a page. Called by
`fleet/deploy_command.py`."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from jaxserve.planner import report
from jaxserve.planner.assumptions import Assumptions
from jaxserve.planner.deploy import Asked, Costs, Deployment, Planned, Sizer
from jaxserve.planner.deploy_demand import Demand
from jaxserve.planner.deploy_drawing import drawing
from jaxserve.planner.deploy_fleet import Overloaded, Times
from jaxserve.planner.models import CostModel
from jaxserve.planner.search import front
from jaxserve.planner.search_options import MONTH
from jaxserve.planner.search_view import MODES, front_svg, layout_text, plan_tree
from jaxserve.planner.text import grid

Rows = list[list[str]]
PREDICTED = "Predicted by rooflines and queueing; nothing here was measured."


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    """What the simulated fleet gave its requests, in seconds."""

    ttft: Times
    tpot: Times
    ttft_asked: float
    tpot_asked: float
    busy: dict[str, float]
    refused: int
    requests: int


class Shown(NamedTuple):
    """Everything that is shown.

    Attributes:
      prices: a line a kind of hardware.
      command: the `plan simulate` of what was written; empty: nothing was.
    """

    title: str
    sizer: Sizer
    planned: Planned
    prices: list[str]
    simulated: Simulated | None
    command: str


def demand_text(asked: Asked) -> str:
    """In a few words."""
    demand = asked.demand
    return (
        f"{demand.rate:g} requests a second, {demand.prompt:,} tokens in ({demand.hits:.1%} in a "
        f"prefix cache), {demand.output:,} out; TTFT {asked.ttft.text}, TPOT {asked.tpot.text}"
    )


def role_rows(made: Deployment) -> Rows:
    """What is rented."""
    fleet = made.fleet
    worker, layout = fleet.worker.layout, fleet.unit.layout
    parts = {
        "prefill": f"{fleet.workers} x (dp {worker.dp} tp {worker.tp}), chunks of "
        f"{fleet.worker.chunk} a group",
        "attention": f"{fleet.units} x (dp {layout.dp} tp {layout.tp}), {layout.lanes} lanes of "
        f"{fleet.unit.slots}",
        "ffn": f"{fleet.units} x (ep {layout.ep} tp {layout.ffn_tp})",
        "decode": f"{fleet.units} x (dp {layout.dp} tp {layout.tp}), {MODES[layout.mode]}, "
        f"{fleet.unit.slots} a group",
    }
    rows = [["", "hardware", "devices", "spare servers", "chips", "USD an hour", "USD a month"]]
    rows[0].insert(1, "workers")
    for role in made.roles:
        rows.append(
            [
                role.name,
                parts[role.name],
                role.hardware.name,
                str(role.devices),
                str(role.spare_hosts),
                f"{role.chips:g}",
                f"{role.dollars:,.2f}",
                f"{role.dollars * MONTH:,.0f}",
            ]
        )
    total = [sum(role.devices for role in made.roles), sum(r.spare_hosts for r in made.roles)]
    chips = sum(role.chips for role in made.roles)
    money = [f"{made.dollars:,.2f}", f"{made.dollars * MONTH:,.0f}"]
    return [*rows, ["together", "", "", str(total[0]), str(total[1]), f"{chips:g}", *money]]


def latency_rows(shown: Shown) -> Rows:
    """TTFT and TPOT, beside what a simulation gave."""
    asked, found = shown.sizer.asked, shown.planned.best.prediction
    rows = [["ms", "mean", "p50", "p90", "p95", "p99", "asked for", "there"]]

    def row(name: str, times: Times, target: str = "", there: float | None = None) -> list[str]:
        values = msgspec.structs.astuple(times)
        last = "" if there is None else f"{there * 1e3:.1f}"
        return [name, *(f"{value * 1e3:.1f}" for value in values), target, last]

    rows.append(row("TTFT", found.ttft, asked.ttft.text, found.ttft_asked))
    if shown.simulated:
        rows.append(
            row("  simulated", shown.simulated.ttft, asked.ttft.text, shown.simulated.ttft_asked)
        )
    rows += [row(f"  {name}", times) for name, times in found.parts.items()]
    rows.append(row("TPOT", found.tpot, asked.tpot.text, found.tpot_asked))
    if shown.simulated:
        rows.append(
            row("  simulated", shown.simulated.tpot, asked.tpot.text, shown.simulated.tpot_asked)
        )
    return rows


def fact_lines(shown: Shown) -> list[str]:
    """Load, hand-off, spares, and what it costs."""
    sizer, made = shown.sizer, shown.planned.best
    demand, found, fleet = sizer.asked.demand, made.prediction, made.fleet
    requests = sizer.requests(demand)
    costs = Costs.of(made, requests, demand.rate)
    kept, link = found.sequences, made.link
    layout = fleet.unit.layout
    lines = [
        f"decoding at a time (Little's law): {demand.rate:g} a second x "
        f"{requests.output.mean():,.0f} tokens x {found.tpot.mean * 1e3:.1f} ms = {kept:,.0f} "
        f"sequences, {found.slots_busy:.0%} of {fleet.units} x {fleet.unit.sequences:,} slots, "
        f"{requests.context:,.0f} tokens each",
        f"prefill: DP groups busy {found.prefill_busy:.0%}, steps of "
        f"{fleet.steps.alone * 1e3:.1f} ms (one prompt) to {fleet.steps.full * 1e3:.1f} ms (all "
        "groups)",
        f"KV hand-off: {link.token_bytes / 1e3:.1f} KB a token, "
        f"{found.link_bytes / demand.rate / 1e6:.1f} MB a request, "
        f"{found.link_bytes / 1e9:.2f} GB/s in all; "
        f"{link.bytes_per_second / 1e9:.0f} GB/s a worker, busy {found.link_busy:.1%}",
        f"drafts: {layout.drafts} a step, {made.plan.tokens_a_step:.2f} tokens; redundant slots of "
        f"experts: {layout.redundant_slots} a rank (prefill "
        f"{fleet.worker.layout.redundant_slots})",
        f"spares: {sizer.asked.spares.text}",
        f"USD: {costs.month:,.0f} a month; {costs.million_in:.3f} a million tokens in (prefill, "
        f"found ones included), {costs.million_out:.3f} a million out (decoding), at this rate "
        "around the clock",
    ]
    return lines + assumed_lines(sizer.model, sizer.searcher.calculator.assumed) + shown.prices


def assumed_lines(model: CostModel, assumed: Assumptions) -> list[str]:
    """What the plan takes for granted that is not so on every system."""
    lines = []
    if any(group.kind == "mla" for group in model.attention):
        form = (
            "keys and values expanded everywhere, which this engine does within a chunk alone"
            if assumed.expanded
            else "as this engine runs them, expanded within a chunk and absorbed before it "
            "(`--assume expanded=true`: expanded everywhere)"
        )
        lines.append(f"prompts of latent attention: {form}; `serve --check` names missing kernels")
    if beyond := assumed.beyond_engine:
        lines.append(f"assumed, and not what this engine does: {', '.join(beyond)}")
    return lines


def variants(asked: Asked) -> Iterator[tuple[str, Demand, float]]:
    """What sensitivity looks at: a fifth less and more. (name, demand, factor of prices)."""
    demand, replace = asked.demand, msgspec.structs.replace
    signs = {"-20 %": 0.8, "+20 %": 1.2}
    for sign, factor in signs.items():
        yield f"rate {sign}", replace(demand, rate=demand.rate * factor), 1.0
    for sign, factor in signs.items():
        yield f"prompts {sign}", replace(demand, prompt=round(demand.prompt * factor)), 1.0
    for sign, factor in signs.items():
        yield f"outputs {sign}", replace(demand, output=round(demand.output * factor)), 1.0
    for sign, factor in signs.items() if demand.hits else ():
        yield f"hits {sign}", replace(demand, hits=min(0.99, demand.hits * factor)), 1.0
    for sign, factor in signs.items():
        yield f"prices {sign}", demand, factor


def sensitivity_rows(shown: Shown) -> Rows:
    """What changes would do to this fleet, and what a fleet of such parts would then take."""
    sizer, made = shown.sizer, shown.planned.best
    asked = sizer.asked
    names = [level.text.split("=")[0] for level in (asked.ttft, asked.tpot)]
    rows = [["", f"TTFT {names[0]} ms", f"TPOT {names[1]} ms", "workers", "units", "USD a month"]]
    rows[0] += ["USD/M in", "USD/M out"]

    def sized(found: Deployment | None, demand: Demand, factor: float) -> list[str]:
        if found is None:
            return ["none meet it", "", "", "", ""]
        costs = Costs.of(found, sizer.requests(demand), demand.rate)
        return [
            str(found.fleet.workers),
            str(found.fleet.units),
            f"{costs.month * factor:,.0f}",
            f"{costs.million_in * factor:.3f}",
            f"{costs.million_out * factor:.3f}",
        ]

    def times(demand: Demand) -> list[str]:
        found, _ = sizer.under(made, demand)
        if isinstance(found, Overloaded):
            return ["overloaded", "overloaded"]
        return [f"{found.ttft_asked * 1e3:.0f}", f"{found.tpot_asked * 1e3:.1f}"]

    rows.append(["as planned", *times(asked.demand), *sized(made, asked.demand, 1.0)])
    for name, demand, factor in variants(asked):
        again = made if demand == asked.demand else sizer.again(made, demand)
        rows.append([name, *times(demand), *sized(again, demand, factor)])
    return rows


def other_rows(shown: Shown) -> Rows:
    """The best of every kind of decode unit."""
    sizer = shown.sizer
    demand = sizer.asked.demand
    rows = [["decode units", "units", "workers", "devices", "USD a month", "USD/M out"]]
    for made in (shown.planned.best, *shown.planned.others):
        costs = Costs.of(made, sizer.requests(demand), demand.rate)
        devices = sum(role.devices for role in made.roles)
        rows.append(
            [
                f"{MODES[made.plan.layout.mode]}: {layout_text(made.plan)}",
                str(made.fleet.units),
                str(made.fleet.workers),
                str(devices),
                f"{costs.month:,.0f}",
                f"{costs.million_out:.3f}",
            ]
        )
    return rows


UNCHANGED = (
    "Times are of the fleet as planned; workers, units and USD of one of the same parts, sized "
    "anew."
)


def text(shown: Shown) -> str:
    """For a terminal."""
    parts = [
        shown.title,
        grid(role_rows(shown.planned.best)),
        grid(latency_rows(shown)),
        "\n".join(fact_lines(shown)),
        f"Sensitivity. {UNCHANGED}\n\n{grid(sensitivity_rows(shown))}",
        grid(other_rows(shown)),
        PREDICTED,
    ]
    if shown.command:
        parts.append(f"in simulated time: {shown.command}")
    return "\n\n".join(parts)


def tree(shown: Shown) -> dict[str, Any]:
    """For programs: seconds, bytes, USD."""
    made, sizer = shown.planned.best, shown.sizer
    demand, fleet = sizer.asked.demand, made.fleet
    costs = Costs.of(made, sizer.requests(demand), demand.rate)
    heads, *rows = sensitivity_rows(shown)
    return {
        "demand": msgspec.to_builtins(demand),
        "targets": {"ttft": sizer.asked.ttft.text, "tpot": sizer.asked.tpot.text},
        "roles": [
            {
                "name": role.name,
                "hardware": role.hardware.name,
                "devices": role.devices,
                "spare_hosts": role.spare_hosts,
                "chips": role.chips,
                "dollars_an_hour": role.dollars,
            }
            for role in made.roles
        ],
        "prefill": {
            "workers": fleet.workers,
            "chunk": fleet.worker.chunk,
            "layout": msgspec.to_builtins(fleet.worker.layout),
        },
        "decode": {
            "units": fleet.units,
            "slots": fleet.unit.slots,
            "plan": plan_tree(made.plan),
        },
        "link": msgspec.to_builtins(made.link),
        "prediction": msgspec.to_builtins(made.prediction),
        "simulated": msgspec.to_builtins(shown.simulated),
        "dollars_a_month": costs.month,
        "dollars_per_million_tokens": {"in": costs.million_in, "out": costs.million_out},
        "prices": shown.prices,
        "sensitivity": [dict(zip(heads, row, strict=True)) for row in rows],
        "simulate": shown.command,
    }


def page(shown: Shown) -> str:
    """With a drawing, and the cost of decoding against its pace."""
    planned, sizer = shown.planned, shown.sizer
    asked = sizer.asked
    fronts = {
        name: front([plan for plan in planned.found.points if plan.layout.mode == mode])
        for mode, name in MODES.items()
    }
    title = f"Decode alone: cost against TPOT, {sizer.context:,} tokens"
    picture = front_svg(title, fronts, asked.tpot.seconds, planned.best.plan)
    sections = [
        ("The deployment", drawing(planned.best, asked) + report.table(role_rows(planned.best))),
        ("Latency", report.table(latency_rows(shown))),
        ("Load and cost", report.lines(fact_lines(shown))),
        ("Sensitivity", f"<p>{UNCHANGED}</p>" + report.table(sensitivity_rows(shown))),
        ("Kinds of decode units", report.table(other_rows(shown))),
        ("What decode units cost", picture),
        ("How it was worked out", report.lines([PREDICTED, *filter(None, [shown.command])])),
    ]
    return report.page(shown.title, sections)
