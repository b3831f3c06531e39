"""`python -m jaxserve.plan`: what a deployment costs, before anything is rented.

`tables` prints Step-3's cost tables from model and hardware files, each cell beside the paper's.
Exit codes: 1 something printed does not come out, 2 something asked for is wrong.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from jaxserve.errors import JaxserveError
from jaxserve.planner.figures import draw
from jaxserve.planner.hardware import CONFIGS
from jaxserve.planner.tables import figures, load_sources, tables
from jaxserve.planner.text import agreement, as_tree, compared_text


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


def _tables(options: argparse.Namespace) -> int:
    sources = load_sources(options.configs)
    printed, drawn = tables(sources), figures(sources)
    if options.svg:
        options.svg.mkdir(parents=True, exist_ok=True)
        for name, text in draw({table.name: table for table in drawn}).items():
            (options.svg / name).write_text(text, encoding="utf-8")
    if options.json:
        print(_json([as_tree(table) for table in (*printed, *drawn)]))
    else:
        print("\n\n".join(map(compared_text, (*printed, *drawn))))
        print(f"\ntables: {agreement(printed)}\nfigures: {agreement(drawn)}")
    return 0


def _json(tree: object) -> str:
    return msgspec.json.format(msgspec.json.encode(tree)).decode()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m jaxserve.plan", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    paper = commands.add_parser("tables", help="Step-3's tables 2 to 7 and figures 1 to 5")
    paper.add_argument("--svg", type=Path, metavar="DIR", help="writes the figures there")
    paper.set_defaults(run=_tables)
    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="for programs")
        command.add_argument(
            "--configs", type=Path, default=CONFIGS, help="folder with models/ and hardware/"
        )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
