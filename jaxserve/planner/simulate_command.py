"""`plan simulate` of one deployment."""

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from jaxserve.errors import ConfigError
from jaxserve.observe import timeline_view
from jaxserve.observe.spans import Span
from jaxserve.observe.timeline import steady_window, summarise, typical_steps
from jaxserve.planner.noise import ExpertLoads, Lengths, read_skew
from jaxserve.planner.options import (
    jitter,
    read_scenario,
)
from jaxserve.planner.scenario import Scenario
from jaxserve.planner.simulate import Conditions, Result, Simulation, Times, Traffic
from jaxserve.planner.view import Part, Report, show

PREFILL_ELSEWHERE = (
    "decode only: prompts come computed from elsewhere, so TTFT is the wait for a slot and a first "
    "step; `--prefill here` computes them, `prefill.workers` in the file makes it a fleet"
)
PREFILL_HERE = "prompts are computed here"
TIMES = Times.__struct_fields__


def run(options: argparse.Namespace) -> None:
    """Runs `plan simulate`: simulates, and shows the report."""
    made, traffic, conditions = _asked(options)

    def simulated(loads: ExpertLoads | None) -> tuple[Result, list[Span]]:
        return Simulation(made.deployment, made.rooflines(loads), traffic, conditions).run()

    loads, moved = read_loads(options, made)
    result, spans = simulated(loads)
    gain = None
    if loads is not None and moved is not None:
        home, (result, spans) = result, simulated(moved)
        gain = Gain.of(loads, moved, home, result)
    if options.timeline:
        timeline_view.write(options.timeline, spans, "as simulated")
    show(options, _report(made, traffic, conditions, result, spans, gain))


class Gain(NamedTuple):
    """Gain of a rebalance: (figure with experts at home, figure after the rebalance)."""

    balance: tuple[float, float]
    """Mean ÷ max tokens of an ffn device."""
    tokens_per_second: tuple[float, float]
    tpot: tuple[float, float]
    """Mean seconds between tokens."""

    @classmethod
    def of(cls, home: ExpertLoads, moved: ExpertLoads, before: Result, after: Result) -> "Gain":
        """Compares a run with experts at home and a run after a rebalance."""
        tpot = [0.0 if each.tpot is None else each.tpot.mean for each in (before, after)]
        rates = before.tokens_per_second, after.tokens_per_second
        return cls((home.balance, moved.balance), rates, (tpot[0], tpot[1]))


def read_loads(
    options: argparse.Namespace, made: Scenario
) -> tuple[ExpertLoads | None, ExpertLoads | None]:
    """Returns how tokens fall on a deployment's ffn devices with experts at home, and, with
    --placed, where a rebalance puts them.

    Raises:
      ConfigError: the options do not say.
    """
    if options.skew is None:
        if options.placed:
            raise ConfigError("--placed needs --skew: without, all experts are alike")
        return None, None
    skew = read_skew(options.skew)
    home = made.expert_loads(skew, seed=options.seed)
    return home, made.expert_loads(skew, seed=options.seed, placed=True) if options.placed else None


def check_lengths(options: argparse.Namespace, made: Scenario) -> Lengths:
    """Returns the lengths of prompts and outputs.

    Raises:
      ConfigError: a sequence of mean lengths is longer than the deployment allows.
    """
    longest = made.deployment.scheduler.max_length
    if options.prompt + options.output > longest:
        raise ConfigError(
            f"--prompt {options.prompt} and --output {options.output} exceed scheduler.max_length "
            f"= {longest}"
        )
    lengths = {"prompt": options.prompt, "output": options.output}
    return Lengths(**lengths, spread=options.spread, longest=longest)


def _asked(options: argparse.Namespace) -> tuple[Scenario, Traffic, Conditions]:
    if options.warm_up >= options.steps:
        raise ConfigError(f"--warm-up {options.warm_up}: expected 0 to {options.steps - 1}")
    made = read_scenario(options, options.prompt + options.output // 2)
    traffic = Traffic(
        lengths=check_lengths(options, made),
        rate=options.rate,
        prefill=options.prefill or ("here" if options.rate else "elsewhere"),
    )
    afd = made.deployment.topology.has("ffn")
    conditions = Conditions(
        domains=options.domains or (made.deployment.domains if afd else 1),
        steps=options.steps,
        warm_up=options.warm_up,
        link=options.link,
        jitter=jitter(options),
        host_seconds=options.host,
        tokens_a_step=1 + options.acceptance,
        seed=options.seed,
    )
    return made, traffic, conditions


def _rows(result: Result, gain: Gain | None = None) -> list[list[str]]:
    """Rows of the report's table, one per quantity."""
    rows = [["", *TIMES]]
    rows += [times_row("TTFT ms", result.ttft), times_row("TPOT ms", result.tpot)]
    numbers = {
        "tokens/s": f"{result.tokens_per_second:.0f}",
        "tokens/s/device": f"{result.tokens_per_device:.1f}",
        "sequences": f"{result.sequences:.0f}",
        "context": f"{result.context:.0f}",
        "requests finished": str(result.finished),
        "preemptions": str(result.preemptions),
        "attention busy": f"{result.attention_busy:.1%}",
        "ffn busy": f"{result.ffn_busy:.1%}",
        "dispatch busy": f"{result.dispatch_busy:.1%}",
        "combine busy": f"{result.combine_busy:.1%}",
        "bubble": f"{result.bubble:.1%}",
        "simulated s": f"{result.seconds:.3f}",
    }
    if gain is not None:
        numbers |= {
            f"{name}, at home": text
            for name, text in (
                ("balance of experts", f"{gain.balance[0]:.3f}"),
                ("tokens/s", f"{gain.tokens_per_second[0]:.0f}"),
                ("TPOT ms", f"{gain.tpot[0] * 1e3:.2f}"),
            )
        }
        numbers["balance of experts, placed"] = f"{gain.balance[1]:.3f}"
        numbers["tokens/s, placed ÷ at home"] = f"{_ratio(gain.tokens_per_second):.3f}"
    rows += [[name, text, "", "", "", ""] for name, text in numbers.items()]
    for stage, seen in result.seen.items():
        name = f"{stage} with waiting µs"
        rows.append([name, f"{seen.mean * 1e6:.0f}", "", "", "", f"{seen.most * 1e6:.0f} most"])
    return rows


def _ratio(pair: tuple[float, float]) -> float:
    return pair[1] / pair[0] if pair[0] else 0.0


def times_row(name: str, found: Times | None) -> list[str]:
    """A row of percentiles in milliseconds."""
    if found is None:
        return [name, *["-"] * len(TIMES)]
    return [name, *(f"{value * 1e3:.2f}" for value in msgspec.structs.astuple(found))]


def _tree(
    traffic: Traffic, conditions: Conditions, result: Result, gain: Gain | None
) -> dict[str, Any]:
    parts = {"traffic": traffic, "conditions": conditions, "result": result}
    tree = {name: msgspec.to_builtins(part) for name, part in parts.items()}
    tree["result"]["seen"] = {stage: seen._asdict() for stage, seen in result.seen.items()}
    tree["result"]["bubble"] = result.bubble
    if gain is not None:
        tree["experts"] = {
            name: {"at_home": pair[0], "placed": pair[1]} for name, pair in gain._asdict().items()
        }
    return tree


def _report(
    made: Scenario,
    traffic: Traffic,
    conditions: Conditions,
    result: Result,
    spans: Sequence[Span],
    gain: Gain | None,
) -> Report:
    layout = made.layout
    scope = PREFILL_ELSEWHERE if traffic.prefill == "elsewhere" else PREFILL_HERE
    notes = [scope]
    if not result.steps:
        notes.append("nothing was counted: more --steps, or fewer of --warm-up")
    told = [
        f"{conditions.domains} x {layout.attention_devices} {made.roles.attention.name} for "
        f"attention (dp {layout.dp}, tp {layout.tp}), {layout.ffn_devices} {made.roles.ffn.name} "
        f"for the FFN (ep {layout.ep}, tp {layout.ffn_tp}), {layout.lanes} lanes",
        f"traffic: {msgspec.json.encode(traffic).decode()}",
        f"conditions: {msgspec.json.encode(conditions).decode()}",
        f"assumed: {msgspec.json.encode(made.attention.assumed).decode()}",
    ]
    steady = summarise(spans, steady_window(spans, typical_steps(spans)))
    picture = timeline_view.svg(spans, steady, "as simulated")
    parts = [
        Part(rows=_rows(result, gain), lines=notes),
        Part("The last steps", pictures=[picture], aside=True),
        Part("What went in", lines=told, aside=True),
    ]
    tree = {"scope": scope, **_tree(traffic, conditions, result, gain)}
    return Report("A deployment, simulated", parts, tree)
