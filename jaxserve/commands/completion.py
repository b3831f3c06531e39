"""`jaxserve completion bash|zsh|tcsh`: a script that completes commands, options and choices."""

import argparse
import importlib
from collections.abc import Sequence

import shtab

from jaxserve.commands.names import COMMANDS


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog="jaxserve completion",
        description='Print a completion script: eval "$(jaxserve completion bash)".',
    )
    made.add_argument("shell", choices=shtab.SUPPORTED_SHELLS)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the script; returns the exit code."""
    options = parser().parse_args(arguments)
    whole = argparse.ArgumentParser(prog="jaxserve")
    commands = whole.add_subparsers()
    for name, (module, text) in COMMANDS.items():
        one = parser() if name == "completion" else importlib.import_module(module).parser()
        commands.add_parser(name, parents=[one], add_help=False, help=text)
    print(shtab.complete(whole, options.shell))
    return 0
