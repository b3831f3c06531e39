"""`python -m jaxserve.plan`: cost and speed of a deployment, before any hardware is rented.

`jaxserve/planner/commands.yaml` lists its commands and their options. Exit codes: 1 no layout meets
the target, or something would fail on the pod; 2 wrong arguments.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxserve.config.shipped import CONFIGS
from jaxserve.errors import JaxserveError
from jaxserve.fleet.deploy_command import add_deploy
from jaxserve.fleet.simulation_command import add_fleet
from jaxserve.planner.options import TABLE, Parser, add_option, add_shared
from jaxserve.planner.simulate_command import add_simulate


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


def _simulate(command: argparse.ArgumentParser) -> None:
    add_simulate(command)
    add_fleet(command)


OTHERS = {
    "deploy": ("a whole deployment for requests at a rate", add_deploy),
    "simulate": ("a deployment, or a fleet, in simulated time", _simulate),
}


def parser() -> Parser:
    """Returns a parser of all commands; `run` of the parsed options runs one."""
    made = Parser(prog="python -m jaxserve.plan", description=__doc__)
    commands = made.add_subparsers(required=True, metavar="command")
    for name, told in TABLE.commands.items():
        command = commands.add_parser(name, help=told.help)
        add_shared(command, *told.shared)
        for option, keywords in told.options.items():
            add_option(command, option, keywords)
        command.set_defaults(run=_later(told.run))
    for name, (text, add) in OTHERS.items():
        add(commands.add_parser(name, help=text))
    for command in commands.choices.values():
        add_shared(command, "json", "html")
        command.add_argument(
            "--configs", type=Path, default=CONFIGS, help="folder with models/ and hardware/"
        )
    return made


def _later(place: str) -> Callable[[argparse.Namespace], int | None]:
    """Returns a function of a module that is imported once the function runs.

    Args:
      place: `module:function`.
    """
    module, _, name = place.partition(":")

    def run(options: argparse.Namespace) -> int | None:
        found: int | None = getattr(importlib.import_module(module), name)(options)
        return found

    return run


if __name__ == "__main__":
    sys.exit(main())
