"""`python -m jaxserve.plan`: cost and speed of a deployment, before any hardware is rented.

`tables` prints Step-3's cost tables from model and hardware files, each cell beside the paper's, or
with `--world` what others measured, beside what we predict.
`search` finds the cheapest layouts that decode within a time per output token (TPOT), `map` whether
AFD, EP or TP is the cheapest, by models, hardware, contexts and TPOTs. `deploy` sizes a whole
deployment: prefill, the pages link, decoding and spares. `simulate` runs a deployment in simulated
time; `calibrate` and `verify` compare predictions with measurements;
`compile` compiles its programs for a TPU topology, and `estimate` says from what was compiled for
H200s how fast they may be. Exit codes: 1 no layout meets the target, or
something would fail on the pod; 2 wrong arguments.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from jaxserve.config.shipped import CONFIGS
from jaxserve.config.topology import PlannedMode
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.fleet.deploy_command import add_deploy
from jaxserve.fleet.simulation_command import add_fleet
from jaxserve.planner import report, world
from jaxserve.planner.advice import why_not
from jaxserve.planner.checks import Check, checks
from jaxserve.planner.compile_command import add_compile
from jaxserve.planner.deployment_file import deployment_text, write_largest
from jaxserve.planner.estimate_command import add_estimate
from jaxserve.planner.figures import draw
from jaxserve.planner.hardware import Hardware
from jaxserve.planner.layouts import Target
from jaxserve.planner.measure_commands import add_calibrate, add_verify
from jaxserve.planner.measurements import read_calibration
from jaxserve.planner.models import load_model, model_config, model_folder
from jaxserve.planner.payoff_command import add_map
from jaxserve.planner.quantities import assumptions, seconds, tokens
from jaxserve.planner.search import Found, Plan, Searcher, front
from jaxserve.planner.search_options import (
    add_formats,
    check_context,
    count,
    price_lines,
    read_acceptance,
    read_formats,
    read_hardware,
)
from jaxserve.planner.search_view import (
    DECODE_ONLY,
    LEGEND,
    MODES,
    best_of,
    check_lines,
    dollars_a_month,
    front_svg,
    layout_text,
    plan_tree,
    plans_rows,
    plans_text,
)
from jaxserve.planner.simulate_command import add_simulate
from jaxserve.planner.skew import read_skew
from jaxserve.planner.stages import Calculator
from jaxserve.planner.tables import figures, load_sources, tables
from jaxserve.planner.text import (
    agreement,
    as_tree,
    compared_rows,
    compared_text,
    grid,
    json_text,
)

NOTHING = "nothing meets the target"
DECODE_TABLES = (
    "decode only: costs of output tokens, as the paper has them, without prompts; prices are the "
    "paper's of 2025-07, not verified"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns the exit code."""
    options = _parse(arguments)
    try:
        return int(options.run(options))
    except JaxserveError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2


def _world(options: argparse.Namespace) -> int:
    found = world.compare(options.configs)
    rows, notes = world.world_rows(found), world.world_notes(found)
    if options.html:
        sections = [(world.world_summary(found), report.table(rows))]
        sections.append(("Sources, and what was taken for granted", report.lines(notes)))
        title = "What others measured, and what the planner predicts"
        options.html.write_text(report.page(title, sections), encoding="utf-8")
    if options.json:
        print(json_text(world.world_tree(found)))
    else:
        print("\n\n".join([grid(rows), "\n".join(notes), world.world_summary(found)]))
    return 0


def _tables(options: argparse.Namespace) -> int:
    if options.world:
        return _world(options)
    sources = load_sources(options.configs)
    printed, drawn = tables(sources), figures(sources)
    everything = [*printed, *drawn]
    pictures = draw({table.name: table for table in drawn})
    if options.svg:
        options.svg.mkdir(parents=True, exist_ok=True)
        for name, text in pictures.items():
            (options.svg / name).write_text(text, encoding="utf-8")
    if options.html:
        sections = []
        for each in everything:
            rows = compared_rows(each)
            papers = [index for index, row in enumerate(rows) if row[0].startswith(" ")]
            sections.append((f"{each.name}: {each.title}", report.table(rows, quiet=papers)))
        sections += [("Pictures", "\n".join(pictures.values()))]
        sections.insert(0, ("What they are of", report.lines([DECODE_TABLES])))
        title = "Step-3's tables and figures, computed and printed"
        options.html.write_text(report.page(title, sections), encoding="utf-8")
    if options.json:
        scope = {"scope": DECODE_TABLES}
        print(json_text([{**scope, **as_tree(table)} for table in everything]))
    else:
        print("\n\n".join(map(compared_text, everything)))
        print(f"\n{DECODE_TABLES}\ntables: {agreement(printed)}\nfigures: {agreement(drawn)}")
    return 0


class _Results(NamedTuple):
    """The results of a search that are shown, by mode."""

    best: dict[PlannedMode, list[Plan]]
    rules: dict[PlannedMode, list[Check]]
    fronts: dict[PlannedMode, list[Plan]]


def _search(options: argparse.Namespace) -> int:
    attention, ffn = read_hardware(options, options.attention_hardware, options.ffn_hardware)
    model = load_model(options.model, options.configs)
    context = tokens(options.context)
    check_context(options, context)
    calculator = Calculator(
        model,
        context,
        read_formats(options, {**attention, **ffn}),
        assumptions(options.assume),
        read_calibration(options.calibration, options.configs).of(Path(options.model).name),
    )
    target = Target(
        tpot=seconds(options.tpot),
        max_devices=options.max_devices,
        modes=tuple(options.modes or MODES),
        most_drafts=options.drafts,
        shared_ranks=options.shared_ranks,
    )
    skew = read_skew(options.skew) if options.skew is not None else None
    accepted = read_acceptance(options, calculator.model)
    searcher = Searcher(calculator, attention, ffn, accepted, skew)
    found = searcher.search(target)
    if not found.plans:
        print(f"error: {why_not(calculator, attention, ffn, target, found)}", file=sys.stderr)
        return 1
    hardware = {**attention, **ffn}
    if options.write:
        _write(options, found.plans[0], searcher, hardware)
    results = _results(options, found, calculator, target, hardware)
    if options.svg:
        options.svg.write_text(_picture(options, results, calculator, target), encoding="utf-8")
    if options.html:
        page = _page(options, results, calculator, target, price_lines(hardware, options.price))
        options.html.write_text(page, encoding="utf-8")
    if options.json:
        print(json_text(_tree(results, calculator, price_lines(hardware, options.price))))
    else:
        _print(results, found.plans[0], price_lines(hardware, options.price))
    return 0


def _results(
    options: argparse.Namespace,
    found: Found,
    calculator: Calculator,
    target: Target,
    hardware: dict[str, Hardware],
) -> _Results:
    results = _Results({}, {}, {})
    for mode in target.modes:
        plans = best_of(found.plans, mode, options.best)
        results.best[mode] = plans
        results.fronts[mode] = front([p for p in found.points if p.layout.mode == mode])
        if plans:
            layout = plans[0].layout
            roles = hardware[layout.attention], hardware[layout.ffn]
            results.rules[mode] = checks(
                calculator.model, calculator.context, target.tpot, *roles, plans[0]
            )
    return results


def _print(results: _Results, cheapest: Plan, prices: list[str]) -> None:
    print(f"{DECODE_ONLY}\n")
    for mode, plans in results.best.items():
        print(f"{MODES[mode]}\n\n{plans_text(plans) if plans else NOTHING}\n")
        if plans:
            print("\n".join(check_lines(results.rules[mode])) + "\n")
    print(LEGEND)
    print(
        f"cheapest: {layout_text(cheapest)}, {cheapest.dollars:.3f} USD a million tokens out, "
        f"{dollars_a_month(cheapest):,.0f} USD a month"
    )
    print("\n".join(prices))


def _tree(results: _Results, calculator: Calculator, prices: list[str]) -> dict[str, Any]:
    return {
        "scope": DECODE_ONLY,
        "prices": prices,
        "best": [plan_tree(plan) for plans in results.best.values() for plan in plans],
        "front": [plan_tree(plan) for plans in results.fronts.values() for plan in plans],
        "checks": {
            mode: [rule._asdict() for rule in rules] for mode, rules in results.rules.items()
        },
        "assumptions": msgspec.to_builtins(calculator.assumed),
    }


def _picture(
    options: argparse.Namespace, results: _Results, calculator: Calculator, target: Target
) -> str:
    title = f"{options.model}, {calculator.context:,} tokens, decode alone: cost against TPOT"
    named = {MODES[mode]: plans for mode, plans in results.fronts.items()}
    plans = [plans[0] for plans in results.best.values() if plans]
    cheapest = min(plans, key=lambda plan: plan.dollars)
    return front_svg(title, named, target.tpot, cheapest)


def _page(
    options: argparse.Namespace,
    results: _Results,
    calculator: Calculator,
    target: Target,
    prices: list[str],
) -> str:
    sections = [("What it is", report.lines([DECODE_ONLY, *prices]))]
    for mode, plans in results.best.items():
        content = f"<p>{NOTHING}</p>"
        if plans:
            rules = report.lines(check_lines(results.rules[mode]))
            content = report.table(plans_rows(plans)) + rules
        sections.append((MODES[mode], content))
    sections.append(("Cost against TPOT", _picture(options, results, calculator, target)))
    assumed = msgspec.to_builtins(calculator.assumed)
    values = [f"{name} = {value}" for name, value in assumed.items()]
    sections.append(("Assumptions", report.lines([LEGEND, ", ".join(values)])))
    title = f"{options.model} at {calculator.context:,} tokens within {target.tpot * 1e3:g} ms"
    return report.page(title, sections)


def _write(
    options: argparse.Namespace, plan: Plan, searcher: Searcher, hardware: dict[str, Hardware]
) -> None:
    folder = model_folder(options.model, options.configs)
    config = model_config(folder)
    if config is None:
        raise ConfigError(f"--write: the engine cannot run {options.model}, only plan it")
    calculator = searcher.calculator

    def text_of(plan: Plan) -> str:
        return deployment_text(
            plan,
            folder.resolve(),
            config,
            calculator.context,
            calculator.formats,
            calculator.assumed,
            hardware,
            options.write.resolve().parent,
        )

    written = write_largest(options.write, plan, searcher, text_of, config)
    if written.batch != plan.batch:
        print(
            f"{options.write}: {written.batch} sequences a DP group and lane, not {plan.batch}: "
            "with activations, as serve counts them, more do not fit",
            file=sys.stderr,
        )


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(prog="python -m jaxserve.plan", description=__doc__)
    commands = made.add_subparsers(required=True, metavar="command")
    paper = commands.add_parser("tables", help="Step-3's tables 2 to 7 and figures 1 to 5")
    paper.add_argument("--svg", type=Path, metavar="DIR", help="writes the figures there")
    paper.add_argument(
        "--world", action="store_true", help="published measurements instead, with our errors"
    )
    paper.set_defaults(run=_tables)
    _search_options(commands.add_parser("search", help="the cheapest layouts that meet a target"))
    add_map(commands.add_parser("map", help="where AFD, EP and TP are the cheapest"))
    add_deploy(commands.add_parser("deploy", help="a whole deployment for requests at a rate"))
    simulate = commands.add_parser("simulate", help="a deployment, or a fleet, in simulated time")
    add_simulate(simulate)
    add_fleet(simulate)
    add_calibrate(commands.add_parser("calibrate", help="measured stages in place of rooflines"))
    add_verify(commands.add_parser("verify", help="predicted against measured stages"))
    add_compile(commands.add_parser("compile", help="all programs for a topology, without it"))
    add_estimate(commands.add_parser("estimate", help="speed from what was compiled for H200s"))
    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="for programs")
        command.add_argument("--html", type=Path, metavar="FILE", help="a page with pictures")
        command.add_argument(
            "--configs", type=Path, default=CONFIGS, help="folder with models/ and hardware/"
        )
    return made


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    return parser().parse_args(arguments)


def _search_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--model", required=True, help="a known model, or a model folder")
    add("--hardware", nargs="+", metavar="NAME", help="of both roles, any mix")
    add("--attention-hardware", nargs="+", metavar="NAME", help="of the attention role alone")
    add("--ffn-hardware", nargs="+", metavar="NAME", help="of the ffn role alone")
    add("--context", required=True, help="mean tokens of a running sequence, as 8192 or 8K")
    add("--tpot", required=True, help="time per output token, as 50ms")
    add("--max-devices", type=count, default=64, help="64")
    add("--modes", nargs="+", choices=list(MODES), help="all of them")
    add("--best", type=count, default=3, help="plans a mode: 3")
    add_formats(command)
    add("--svg", type=Path, metavar="FILE", help="draws the front there")
    add("--write", type=Path, metavar="FILE", help="writes the cheapest plan's deployment there")
    command.set_defaults(run=_search)


if __name__ == "__main__":
    sys.exit(main())
