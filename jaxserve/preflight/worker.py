"""One check on devices, in a process of its own: `python -m jaxserve.preflight.worker CHECK …`.

Started by `device_checks.py` with the options of `serve`, on every process of a deployment at once.
Joins the deployment as `serve` does, and writes the outcome to the file of `--result`.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from jaxserve.config.command_line import add_deployment_arguments, read_deployment
from jaxserve.config.deployment import Deployment
from jaxserve.config.load import deployment_of
from jaxserve.fleet import bootstrap
from jaxserve.fleet.arguments import ProcessArguments, from_arguments
from jaxserve.fleet.arguments import add_arguments as add_process_arguments
from jaxserve.fleet.follower import Follower
from jaxserve.fleet.sizing import Sizing
from jaxserve.preflight.outcomes import run

BARRIER_SECONDS = 600.0
"""For the slowest process to end the check; the deadline of the check is shorter."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the check; the end of it is the end of the process."""
    options = parser().parse_args(arguments)
    process = from_arguments(options)
    deployment = read_part(options, process)
    from jaxserve.preflight.parts import PARTS

    part = PARTS[options.check]
    with bootstrap.joined(process, deployment) as peers:
        outcome = run(
            options.check,
            lambda: part(deployment, options),
            time.monotonic,
            process.process_id,
        )
        result = Path(options.result)
        whole = result.with_suffix(".part")
        whole.write_bytes(msgspec.json.encode(outcome))
        whole.replace(result)
        if outcome.state == "failed":
            raise SystemExit(1)  # the other processes hear of it and need not wait
        if process.processes > 1:
            from jaxserve.bench.workers import barrier

            barrier("preflight", BARRIER_SECONDS)
        if isinstance(peers, Follower):
            for _ in peers.boundaries():  # until the leader leaves
                pass
    sys.stdout.flush()
    os._exit(0)  # an ordinary exit would wait for transfer servers


def read_part(options: argparse.Namespace, process: ProcessArguments) -> Deployment:
    """The deployment of one worker: of a fleet, of the part that `--part` names."""
    alone = process.processes == 1 and not process.role
    sizing = Sizing() if alone else None
    whole = read_deployment(options.config, options.model, options.set, sizing)
    return deployment_of(whole, options.part) if options.part else whole


def parser() -> argparse.ArgumentParser:
    """The options of the worker."""
    made = argparse.ArgumentParser()
    made.add_argument("check")
    add_deployment_arguments(made)
    add_process_arguments(made)
    made.add_argument("--part", default="")
    made.add_argument("--result", required=True)
    made.add_argument("--layers", type=int)
    return made


if __name__ == "__main__":
    main()
