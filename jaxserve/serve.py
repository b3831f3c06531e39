"""`jaxserve serve --config F`: a deployment on the network, until a signal ends it.

`--model DIR`, or `DIR` alone, serves a bare model folder, or replaces the model of the deployment
file; without both the demo is served. `--check` runs `jaxserve check` with the other options.

The life of the process: bind the port (health says NOT_SERVING), load and compile, print one line
that starts with `ready` (with `--log-format json`: an object with that message), serve; on SIGTERM
or SIGINT finish what runs and exit 0. Of several processes, any may get the signal. Exit codes: 1
the engine failed, 2 the configuration or the checkpoint is wrong, 75 it would fit if others had
less of the host's memory (worth another start, which 2 is not), 128 + n a signal before ready or a
second one.
"""

import argparse
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxserve import ports
from jaxserve.commands.cores import bind_task
from jaxserve.config.command_line import (
    add_deployment_arguments,
    add_options,
    check_timeline,
    read_deployment,
)
from jaxserve.config.deployment import Deployment
from jaxserve.config.shrink import shrunk
from jaxserve.errors import CheckpointError, ConfigError, EngineFailedError, exit_code
from jaxserve.fleet.arguments import ProcessArguments, from_arguments
from jaxserve.fleet.arguments import add_arguments as add_process_arguments
from jaxserve.fleet.sizing import Sizing
from jaxserve.logs import configure

if TYPE_CHECKING:
    from jaxserve.fleet.prepared import Prepared


def main(arguments: Sequence[str] | None = None, prepared: "Prepared | None" = None) -> int:
    """Serves until a signal or a failure; returns the exit code.

    Args:
      prepared: work that this process did as a spare of the local launcher.
    """
    given = sys.argv[1:] if arguments is None else arguments
    options = parse(parser(), given)
    if options.check:  # A program of its own, of which a process that serves holds nothing.
        return int(pkgutil.resolve_name("jaxserve.check:main")(given))
    configure(options.log_format)
    try:
        process = from_arguments(options)
        alone = process.processes == process.host_processes == 1
        sizing = Sizing(stages=bool(options.timeline)) if alone and not process.role else None
        deployment = read_deployment(options.config, options.model, options.set, sizing)
        if sizing is not None:
            sizing.log()
        ports.use(deployment.cluster.ports)
        if deployment.cluster.tls:
            pkgutil.resolve_name("jaxserve.link.session.tls:use")(deployment.cluster.tls)
        check_timeline(options.timeline, deployment)
        if process.host_processes > 1:
            from jaxserve.commands.host import run_processes

            return run_processes(deployment, process, given)
        bind_task()
        # Each imports what it needs: a router has no JAX, and an ffn worker that is started again
        # is back sooner without engine, tokenizers and servers.
        if process.role == "router":
            from jaxserve.commands.routing import Routing

            return Routing(deployment, options, process).run()
        if process.role == "ffn" and deployment.topology.crosses_runtimes:
            from jaxserve.fleet.ffn_runtime import answer_messages

            deployment = _ready_to_start(deployment, process, given)
            more: dict[str, Any] = {"prepared": prepared}
            if process.processes > 1:
                from jaxserve.fleet.ffn_group import group_of

                more["joined"] = group_of
            if max(deployment.server.follower_http_port, deployment.server.follower_grpc_port) >= 0:
                from jaxserve.server.choice import ProbedLoop

                more["on_turn"] = ProbedLoop(deployment, options.insecure_bind).turn
            return answer_messages(deployment, process, options.listen, **more)
        from jaxserve.commands.worker_part import part_of

        deployment, process, part = part_of(deployment, process, options.listen)
        deployment = _ready_to_start(deployment, process, given)
        if process.is_leader:
            from jaxserve.commands.serving import Serving

            return Serving(deployment, options, process, part, prepared).run()
        from jaxserve.commands.following import follow

        return follow(deployment, options, process, part, prepared)
    except (ConfigError, CheckpointError, EngineFailedError) as error:
        print(f"jaxserve: {error}", file=sys.stderr)
        # A launcher starts a failed stand-in again as the prefill worker that it was before.
        if options.stand_in or isinstance(error, EngineFailedError):
            return 1
        return exit_code(error)


def _ready_to_start(
    deployment: Deployment, process: ProcessArguments, given: Sequence[str]
) -> Deployment:
    """Returns the deployment on the devices that are left (`--devices`), with links that work here.
    Raises ConfigError if the process cannot play its role; nothing is loaded yet."""
    from jaxserve.commands.self_tests import with_tested_links
    from jaxserve.fleet.devices import own_share

    if process.devices is not None:
        if process.processes > 1:
            raise ConfigError(
                f"--devices {process.devices}: of {process.processes} processes; start the worker "
                "with sizes that the devices suffice for (--set attention.dp=N)"
            )
        role: Literal["attention", "ffn"] = "ffn" if process.role == "ffn" else "attention"
        deployment = shrunk(deployment, role, process.devices)
    own_share(process, deployment)
    return with_tested_links(deployment, given)


def parser(command: str = "serve", description: str = "Serve a model.") -> argparse.ArgumentParser:
    """The options of the command, or of another with the same options."""
    made = argparse.ArgumentParser(
        prog=f"jaxserve {command}",
        usage=f"jaxserve {command} [MODEL] [--config FILE] [--set KEY=VALUE] [--port N] [options]",
        description=description,
    )
    made.add_argument("folder", nargs="?", metavar="MODEL", help="the same as --model")
    add_deployment_arguments(made)
    add_options(made, Path(__file__).with_suffix(".yaml"))
    add_process_arguments(made)
    return made


def parse(made: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the arguments; a model that is named twice ends the program, and without a model and a
    configuration the demo is meant."""
    options = made.parse_args(arguments)
    if options.folder is not None and options.model is not None:
        made.error(f"MODEL {options.folder} and --model {options.model}: two models")
    options.model = options.folder if options.model is None else options.model
    own = {"host": options.host, "http_port": options.port}
    given = [f"server.{key}={value}" for key, value in own.items() if value is not None]
    options.set = [*options.set, *given]
    if options.config is None and options.model is None:
        print("jaxserve: no model is named: --config demo is taken", file=sys.stderr)
        options.config = "demo"
    return options


if __name__ == "__main__":
    sys.exit(main())
