"""`jaxserve check --config F`, or `serve --check`: whether a deployment fits, before it starts.

It prints how large the model is and what every device would hold, and compares the tensors that the
headers of the weight files name with those that the model has. It needs config.json alone, and none
of the devices. It takes all options of `serve`. Exit codes: 0 the deployment fits, 1 it does not, 2
tensors are missing or others, or the configuration is wrong.
"""

import argparse
import sys
from collections.abc import Sequence

from jaxserve import serve
from jaxserve.commands.checking import check, describe_slice, named_machine
from jaxserve.config.command_line import read_deployment
from jaxserve.errors import CheckpointError, ConfigError, exit_code
from jaxserve.fleet.arguments import from_arguments
from jaxserve.fleet.sizing import Sizing
from jaxserve.logs import configure


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    return serve.parser("check", "Say what a deployment holds on every device.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks a deployment; returns the exit code."""
    options = serve.parse(parser(), arguments)
    configure(options.log_format)
    try:
        process = from_arguments(options)
        alone = process.processes == process.host_processes == 1
        sizing = Sizing(named_machine) if alone and not process.role else None
        deployment = read_deployment(options.config, options.model, options.set, sizing)
        code = check(deployment, sizing)
        print(describe_slice(deployment), end="")
    except (ConfigError, CheckpointError) as error:
        print(f"jaxserve: {error}", file=sys.stderr)
        return exit_code(error)
    return code


if __name__ == "__main__":
    sys.exit(main())
