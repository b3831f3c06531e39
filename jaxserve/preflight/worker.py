"""One check on devices, in a process of its own: `python -m jaxserve.preflight.worker CHECK …`.

Started by `children.py` and `commands/self_tests.py` with the options of `serve`, on every
process of a deployment at once. Joins the deployment as `serve` does, and writes the outcome to the
file of `--result`. Exit code 0: no process of the deployment has failed the check.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from jaxserve import ports
from jaxserve.commands.worker_part import part_of
from jaxserve.config.command_line import add_deployment_arguments, read_deployment
from jaxserve.config.deployment import Deployment
from jaxserve.config.load import deployment_of
from jaxserve.errors import EngineFailedError
from jaxserve.fleet import bootstrap
from jaxserve.fleet.arguments import ProcessArguments, from_arguments
from jaxserve.fleet.arguments import add_arguments as add_process_arguments
from jaxserve.fleet.follower import Follower
from jaxserve.fleet.sizing import Sizing
from jaxserve.link.session import tls
from jaxserve.logs import configure
from jaxserve.preflight.outcomes import run

BARRIER_SECONDS = 600.0
"""For the slowest process to end the check; the deadline of the check is shorter."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the check; the end of it is the end of the process."""
    options, _ = parser().parse_known_args(arguments)  # the others are options of serve
    configure("text")
    deployment, process = read_part(options)
    ports.use(deployment.cluster.ports)
    tls.use(deployment.cluster.tls)
    from jaxserve.preflight.parts import PARTS

    part = PARTS[options.check]
    with bootstrap.joined(process, deployment) as peers:
        outcome = run(
            options.check,
            lambda: part(deployment, options),
            time.monotonic,
            process.process_id,
        )
        if options.result:
            result = Path(options.result)
            whole = result.with_suffix(".part")
            whole.write_bytes(msgspec.json.encode(outcome))
            whole.replace(result)
        if outcome.state == "failed":  # the other processes hear of it and need not wait
            raise EngineFailedError(f"{options.check}: {outcome.text}")
        if process.processes > 1:
            from jaxserve.bench.workers import barrier

            barrier("preflight", BARRIER_SECONDS)
        if isinstance(peers, Follower):
            for _ in peers.boundaries():  # until the leader leaves
                pass
    sys.stdout.flush()
    os._exit(0)  # an ordinary exit would wait for transfer servers


def read_part(options: argparse.Namespace) -> tuple[Deployment, ProcessArguments]:
    """The deployment of one worker and its place there: of a fleet, of the part that `--part` or
    `--role` names."""
    process = from_arguments(options)
    sizing = Sizing() if process.processes == 1 and not process.role else None
    whole = read_deployment(options.config, options.model, options.set, sizing)
    if options.part:
        return deployment_of(whole, options.part), process
    own, process, _ = part_of(whole, process, options.listen)
    return own, process


def parser() -> argparse.ArgumentParser:
    """The options of the worker."""
    made = argparse.ArgumentParser()
    made.add_argument("check")
    add_deployment_arguments(made)
    add_process_arguments(made)
    made.add_argument("--part", default="")
    made.add_argument("--result")
    made.add_argument("--listen")
    made.add_argument("--layers", type=int)
    return made


if __name__ == "__main__":
    main()
