"""`jaxserve completion SHELL`: a script that completes commands, options, choices, and names: of
files and folders and, in bash, of the deployments, hardware and keys that come with jaxserve."""

import argparse
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import shtab

from jaxserve.commands.names import COMMANDS
from jaxserve.config.load import known_keys
from jaxserve.config.shipped import CONFIGS, deployment_names

PATHS = {
    "FILE": shtab.FILE,
    "DIR": shtab.DIRECTORY,
    "FOLDER": shtab.DIRECTORY,
    "PATH": shtab.FILE,
    "SRC": shtab.DIRECTORY,
    "DST": shtab.DIRECTORY,
}
"""How the value of an argument is completed, by its metavar."""

NO_SPACE = """
_jaxserve_without_space() {
  _shtab_jaxserve "$@"
  [[ "${COMPREPLY[0]-}" != *= ]] || compopt -o nospace 2>/dev/null || :
}
complete -o bashdefault -F _jaxserve_without_space jaxserve
"""
"""For bash: after `cache.pages=` comes a value, and no blank."""


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
    deployments = _names("File_deployment", deployment_names(), files=True)
    hardware = sorted(path.stem for path in (CONFIGS / "hardware").glob("*.yaml"))
    by_option = {
        "--config": deployments,
        "--set": _names("key", [f"{key}=" for key in known_keys()]),
        "--hardware": _names("hardware", hardware),
    }
    for action in _values(whole):
        named = [by_option[name] for name in action.option_strings if name in by_option]
        if named or action.metavar in PATHS:
            # shtab's way to say how a value is completed.
            action.complete = named[0] if named else PATHS[str(action.metavar)]  # type: ignore[attr-defined]
    print(shtab.complete(whole, options.shell) + (NO_SPACE if options.shell == "bash" else ""))
    return 0


def _values(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The arguments with values that are not a choice of few, of the subcommands, too."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield from _values(one)
        elif action.nargs != 0 and not action.choices:
            yield action


def _names(name: str, words: Sequence[str], files: bool = False) -> dict[str, Any]:
    """Completes one of the words or, with `files`, a file (which shtab sees by `File` in the name);
    where the shell is another than bash, files alone."""
    lines = [f"_jaxserve_{name}() {{", f'  compgen -W "{" ".join(words)}" -- "$1"']
    lines += ['  compgen -f -- "$1"'] * files
    bash = {"bash": f"_jaxserve_{name}", "preamble": {"bash": "\n".join([*lines, "}"])}}
    return {**(shtab.FILE if files else {}), **bash}
