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

from jaxserve.config.shipped import CONFIGS
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.fleet.deploy_command import add_deploy
from jaxserve.fleet.simulation_command import add_fleet
from jaxserve.planner import tables, world
from jaxserve.planner.advice import why_not
from jaxserve.planner.compile_command import add_compile
from jaxserve.planner.deployment_file import plan_file, write_plan
from jaxserve.planner.estimate_command import add_estimate
from jaxserve.planner.layouts import Target
from jaxserve.planner.measure_commands import add_calibrate, add_verify
from jaxserve.planner.options import (
    SEARCHED,
    Parser,
    add_shared,
    number,
    positions,
    price_lines,
    read_formats,
    read_hardware,
    read_searcher,
    seconds,
    tokens,
)
from jaxserve.planner.payoff import add_map
from jaxserve.planner.search_view import front_svg, search_report
from jaxserve.planner.simulate_command import add_simulate
from jaxserve.planner.view import show


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns the exit code."""
    try:
        options = parser().parse_args(arguments)
        return int(options.run(options) or 0)
    except JaxserveError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2


def _tables(options: argparse.Namespace) -> None:
    if options.world:
        return show(options, world.world_report(world.compare(options.configs)))
    return show(options, tables.report(tables.tables(options.configs)))


def _search(options: argparse.Namespace) -> int:
    attention, ffn = read_hardware(options, options.attention_hardware, options.ffn_hardware)
    hardware = {**attention, **ffn}
    most = positions(options.model, options.configs)
    if most is not None and options.context > most:
        raise ConfigError(f"--context {options.context}: {options.model} has {most} positions")
    formats = read_formats(options, hardware)
    searcher = read_searcher(options, attention, ffn, options.context, formats)
    target = Target(
        tpot=options.tpot,
        max_devices=options.max_devices,
        modes=tuple(options.modes),
        most_drafts=options.drafts,
        shared_ranks=options.shared_ranks,
    )
    found = searcher.search(target)
    if not found.plans:
        print(f"error: {why_not(searcher, target, found)}", file=sys.stderr)
        return 1
    if options.write:
        write_plan(plan_file(options, hardware), found.plans[0], searcher)
    prices = price_lines(hardware, options.price)
    calculator, best = searcher.calculator, options.best
    report = search_report(options.model, calculator, target, found, hardware, prices, best)
    if options.svg:
        title = f"{options.model}, {options.context:,} tokens, decode alone: cost against TPOT"
        picture = front_svg(title, found, target, found.plans[0])
        options.svg.write_text(picture, encoding="utf-8")
    show(options, report)
    return 0


def _add_tables(command: argparse.ArgumentParser) -> None:
    world = "published measurements instead, with our errors"
    command.add_argument("--world", action="store_true", help=world)
    command.set_defaults(run=_tables)


def _add_search(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add_shared(command, *SEARCHED)
    add("--hardware", nargs="+", metavar="NAME", help="of both roles, any mix")
    add("--attention-hardware", nargs="+", metavar="NAME", help="of the attention role alone")
    add("--ffn-hardware", nargs="+", metavar="NAME", help="of the ffn role alone")
    add("--context", type=tokens, required=True, help="mean of a running sequence, as 8192 or 8K")
    add("--tpot", type=seconds, required=True, help="time per output token, as 50ms")
    add("--best", type=number(1, 4096), default=3, help="plans a mode: 3")
    add("--svg", type=Path, metavar="FILE", help="draws the front there")
    add("--write", type=Path, metavar="FILE", help="writes the cheapest plan's deployment there")
    command.set_defaults(run=_search)


COMMANDS = {
    "tables": ("Step-3's tables 2 to 7", _add_tables),
    "search": ("the cheapest layouts that meet a target", _add_search),
    "map": ("where AFD, EP and TP are the cheapest", add_map),
    "deploy": ("a whole deployment for requests at a rate", add_deploy),
    "simulate": ("a deployment, or a fleet, in simulated time", add_simulate),
    "calibrate": ("measured stages in place of rooflines", add_calibrate),
    "verify": ("predicted against measured stages", add_verify),
    "compile": ("all programs for a topology, without it", add_compile),
    "estimate": ("speed from what was compiled for H200s", add_estimate),
}


def parser() -> Parser:
    """The options of the command."""
    made = Parser(prog="python -m jaxserve.plan", description=__doc__)
    commands = made.add_subparsers(required=True, metavar="command")
    for name, (text, add) in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        add(command)
        if name == "simulate":
            add_fleet(command)
        command.add_argument("--json", action="store_true", help="for programs")
        command.add_argument("--html", type=Path, metavar="FILE", help="a page with pictures")
        command.add_argument(
            "--configs", type=Path, default=CONFIGS, help="folder with models/ and hardware/"
        )
    return made


if __name__ == "__main__":
    sys.exit(main())
