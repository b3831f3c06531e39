"""`python -m jaxserve.plan`: cost and speed of a deployment, before any hardware is rented.

`jaxserve/planner/commands.yaml` lists its commands and their options. Exit codes: 1 no layout meets
the target, or something would fail on the pod; 2 wrong arguments.
"""

import sys
from collections.abc import Sequence

from jaxserve.errors import JaxserveError
from jaxserve.planner.options import TABLE, Parser, add_command


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


def parser() -> Parser:
    """Returns a parser of all commands; `run` of the parsed options runs one."""
    made = Parser(prog="python -m jaxserve.plan", description=__doc__)
    commands = made.add_subparsers(required=True, metavar="command")
    for name, command in TABLE["commands"].items():
        add_command(commands.add_parser(name, help=command["help"]), name)
    return made


if __name__ == "__main__":
    sys.exit(main())
