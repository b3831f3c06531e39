"""A plan of a whole deployment for a terminal, for programs and as a page.

Called by `fleet/deploy_command.py`.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from jaxserve.planner.deploy import Asked, Deployment, Planned, Prediction, Sizer
from jaxserve.planner.deploy_demand import Demand
from jaxserve.planner.hardware import MONTH
from jaxserve.planner.layouts import MODES
from jaxserve.planner.search_view import front_svg, plan_tree
from jaxserve.planner.simulate import Times
from jaxserve.planner.view import Part, Report

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
    sizer: Sizer
    planned: Planned
    prices: list[str]
    of_file: Prediction | None
    command: str

    @property
    def asked(self) -> Asked:
        """The demand, its targets, and what may be rented."""
        return self.sizer.asked

    @property
    def made(self) -> Deployment:
        """The best deployment."""
        return self.planned.best


def deploy_report(shown: Shown) -> Report:
    """The plan with its latency, load, cost, sensitivity and alternatives."""
    made, asked = shown.made, shown.asked
    title = f"Decode alone: cost against TPOT, {shown.sizer.context:,} tokens"
    picture = front_svg(title, shown.planned.found, asked.target, made.plan)
    command = [f"in simulated time: {shown.command}"] if shown.command else []
    sensitivity = _sensitivity(shown)
    parts = [
        Part(shown.title, _role_rows(made)),
        Part("Latency", _latency_rows(shown)),
        Part("Load and cost", lines=_facts(shown)),
        Part(f"Sensitivity. {UNCHANGED}", _sensitivity_rows(asked, sensitivity)),
        Part("What else was looked at", [["layout", ""], *map(list, shown.planned.reasons)]),
        Part("What decode units cost", pictures=[picture], aside=True),
        Part(lines=[PREDICTED, *command]),
    ]
    return Report(shown.title, parts, _tree(shown, sensitivity))


def _role_rows(made: Deployment) -> list[list[str]]:
    fleet = made.fleet
    worker, unit = fleet.worker.layout, fleet.unit
    dp, tp = unit.layout.dp, unit.layout.tp
    parts = {
        "prefill": f"{fleet.workers} x (dp {worker.dp} tp {worker.tp}), chunks of "
        f"{fleet.worker.chunk} a group",
        "attention": f"{fleet.units} x (dp {dp} tp {tp}), {unit.layout.lanes} lanes of "
        f"{fleet.slots}",
        "ffn": f"{fleet.units} x (ep {unit.layout.ep} tp {unit.layout.ffn_tp})",
        "decode": f"{fleet.units} x (dp {dp} tp {tp}), {MODES[unit.layout.mode]}, "
        f"{fleet.slots} a group",
    }

    def row(devices: int, spares: int, chips: float, dollars: float) -> list[str]:
        money = f"{dollars:,.2f}", f"{dollars * MONTH:,.0f}"
        return [str(devices), str(spares), f"{chips:g}", *money]

    rows = [["", "workers", "hardware", "devices", "spare servers", "chips", "USD an hour"]]
    rows[0].append("USD a month")
    numbers = [(role.devices, role.spare_hosts, role.chips, role.dollars) for role in made.roles]
    for role, each in zip(made.roles, numbers, strict=True):
        rows.append([role.name, parts[role.name], role.hardware.name, *row(*each)])
    devices, spares, chips, dollars = (sum(column) for column in zip(*numbers, strict=True))
    return [*rows, ["together", "", "", *row(int(devices), int(spares), chips, dollars)]]


def _latency_rows(shown: Shown) -> list[list[str]]:
    """TTFT and TPOT as sized, and as the written file's simulation gave them."""
    asked, found, of_file = shown.asked, shown.made.prediction, shown.of_file
    rows = [["ms", "mean", "p50", "p90", "p95", "p99", "asked for", "there"]]

    def row(name: str, times: Times, target: str = "", there: float | None = None) -> None:
        values = msgspec.structs.astuple(times)
        last = "" if there is None else f"{there * 1e3:.1f}"
        rows.append([name, *(f"{value * 1e3:.1f}" for value in values), target, last])

    row("TTFT", found.ttft, asked.ttft.text, found.ttft_asked)
    for name, times in found.parts.items():
        row(f"  wait for {name}", times)
    if of_file:
        row("  of the file", of_file.ttft, asked.ttft.text, of_file.ttft_asked)
    row("TPOT", found.tpot, asked.tpot.text, found.tpot_asked)
    if of_file:
        row("  of the file", of_file.tpot, asked.tpot.text, of_file.tpot_asked)
    return rows


def _facts(shown: Shown) -> list[str]:
    """Load, hand-off, spares, and what it costs."""
    made, demand, sizer = shown.made, shown.asked.demand, shown.sizer
    found, fleet, link = made.prediction, made.fleet, made.link
    requests, layout = sizer.requests(demand), fleet.unit.layout
    million_in, million_out = made.millions(requests, demand.rate)
    crossing = link.tokens(requests) * link.token_bytes
    busy = ", ".join(f"{role} {share:.0%}" for role, share in found.busy.items())
    lines = [
        f"simulated: {found.requests} requests that count, {found.refused} refused; busy: {busy}",
        f"decoding at a time (Little's law): {demand.rate:g} a second x "
        f"{requests.output.mean():,.0f} tokens x {found.tpot.mean * 1e3:.1f} ms = "
        f"{_sequences(shown):,.0f} sequences, {_sequences(shown) / _slots(made):.0%} of "
        f"{fleet.units} x {fleet.slots * fleet.unit.lanes:,} slots, {requests.context:,.0f} tokens "
        "each",
        f"KV hand-off: {link.token_bytes / 1e3:.1f} KB a token, {crossing / 1e6:.1f} MB a request, "
        f"{demand.rate * crossing / 1e9:.2f} GB/s in all; {link.bytes_per_second / 1e9:.0f} GB/s a "
        "worker",
        f"drafts: {layout.drafts} a step, {made.plan.tokens_a_step:.2f} tokens; redundant slots of "
        f"experts: {layout.redundant_slots} a rank (prefill "
        f"{fleet.worker.layout.redundant_slots})",
        f"spares: {shown.asked.spares.text}",
        f"USD: {made.month:,.0f} a month; {million_in:.3f} a million tokens in (prefill, found "
        f"ones included), {million_out:.3f} a million out (decoding), at this rate around the "
        "clock",
    ]
    assumed = sizer.searcher.calculator.assumed
    if any(group.kind == "mla" for group in sizer.model.attention):
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


def _sequences(shown: Shown) -> float:
    """Sequences that decode at a time, by Little's law."""
    demand = shown.asked.demand
    output = float(shown.sizer.requests(demand).output.mean())
    return demand.rate * output * shown.made.prediction.tpot.mean


def _slots(made: Deployment) -> int:
    return made.fleet.units * made.fleet.unit.lanes * made.fleet.slots


def _variants(demand: Demand) -> Iterator[tuple[str, Demand, float]]:
    """Yields demands a fifth less and more: (name, demand, factor of prices)."""
    fields = {"rate": "rate", "prompts": "prompt", "outputs": "output", "hits": "hits"}
    for name, field in fields.items():
        value = getattr(demand, field)
        for sign, factor in (("-20 %", 0.8), ("+20 %", 1.2)):
            changed = {"hits": min(0.99, value * factor), "rate": value * factor}
            more = {field: changed.get(field, round(value * factor))}
            if value:
                yield f"{name} {sign}", msgspec.structs.replace(demand, **more), 1.0
    yield "prices -20 %", demand, 0.8
    yield "prices +20 %", demand, 1.2


def _sensitivity(shown: Shown) -> list[dict[str, Any]]:
    """The fleet of the same kinds of workers and units that another demand, or targets a fifth
    tighter or looser, would take: seconds and USD by name; only the change, where none does."""
    sizer, made, asked = shown.sizer, shown.made, shown.asked
    found: list[dict[str, Any]] = []

    def add(name: str, other: Deployment | None, demand: Demand, factor: float = 1.0) -> None:
        if other is None:
            found.append({"change": name})
            return
        millions = other.millions(sizer.requests(demand), demand.rate)
        found.append(
            {
                "change": name,
                "ttft": other.prediction.ttft_asked,
                "tpot": other.prediction.tpot_asked,
                "workers": other.fleet.workers,
                "units": other.fleet.units,
                "dollars_a_month": other.month * factor,
                "dollars_per_million_tokens": {
                    name: one * factor for name, one in zip(("in", "out"), millions, strict=True)
                },
            }
        )

    add("as planned", made, asked.demand)
    for name, demand, factor in _variants(asked.demand):
        again = made if demand == asked.demand else sizer.again(made, demand)
        add(name, again, demand, factor)
    for name in ("ttft", "tpot"):
        level = getattr(asked, name)
        for sign, factor in (("-20 %", 0.8), ("+20 %", 1.2)):
            moved = msgspec.structs.replace(level, seconds=level.seconds * factor)
            other = sizer.asking(msgspec.structs.replace(asked, **{name: moved}))
            add(f"{name.upper()} {sign}", other.again(made, asked.demand), asked.demand)
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
    made, asked, fleet = shown.made, shown.asked, shown.made.fleet
    requests = shown.sizer.requests(asked.demand)
    million_in, million_out = made.millions(requests, asked.demand.rate)
    return {
        "demand": msgspec.to_builtins(asked.demand),
        "targets": {"ttft": asked.ttft.text, "tpot": asked.tpot.text},
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
            "slots": fleet.slots,
            "plan": plan_tree(made.plan),
        },
        "link": msgspec.to_builtins(made.link),
        "prediction": msgspec.to_builtins(made.prediction),
        "of_file": msgspec.to_builtins(shown.of_file),
        "dollars_a_month": made.month,
        "dollars_per_million_tokens": {"in": million_in, "out": million_out},
        "prices": shown.prices,
        "sensitivity": sensitivity,
        "alternatives": dict(shown.planned.reasons),
        "simulate": shown.command,
    }
