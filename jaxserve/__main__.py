"""`jaxserve COMMAND …`, also as `python -m jaxserve COMMAND …`: the commands under one name.

Each command imports what it needs when it runs: `jaxserve doctor` has to answer where JAX does not
start.
"""

import importlib
import sys
from collections.abc import Sequence

from jaxserve.commands.names import COMMANDS


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code, 2 if there is none of that name."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given in (["--version"], ["-V"]):
        import jaxserve

        print(f"jaxserve {jaxserve.__version__}")
        return 0
    if not given or given[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if given[0] not in COMMANDS:
        print(f"jaxserve: there is no command {given[0]!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    module, _ = COMMANDS[given[0]]
    return int(importlib.import_module(module).main(given[1:]))


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        ["usage: jaxserve COMMAND [options]", "", *lines, "", "jaxserve COMMAND --help says more."]
    )


if __name__ == "__main__":
    sys.exit(main())
