"""A fleet on this host: `local.py --fleet`, a process each for router, prefill workers and domains.

How many there are is what the deployment says (`prefill.workers`, `domains`); with `link.transport:
pull` an ffn worker serves the domains. All listen on free ports of loopback, whatever addresses
the deployment has. The router's end is the end of all. A process that dies stays dead, unless
`--restart` says otherwise: then it is started again, as a service manager would, the router
included, and a worker of several processes as a whole.
"""

import argparse
import sys
from collections.abc import Sequence

from processes import free_ports, say
from supervisor import Member, Restarts, Supervisor, with_peers

from jaxserve.config.command_line import add_deployment_arguments, read_deployment
from jaxserve.config.deployment import Deployment
from jaxserve.config.load import deployment_of
from jaxserve.errors import ConfigError


def run(options: argparse.Namespace, forwarded: Sequence[str]) -> int:
    """Starts all processes, prints their roles, and returns the router's exit code."""
    try:
        members = fleet_of(
            _deployment(forwarded), options.processes, options.apart, options.standbys
        )
    except ConfigError as error:
        say(f"{error}")
        return 2
    if options.peers:
        members = [members[0], *with_peers(members[1:])]
    restarted = range(len(members)) if options.restart else ()
    return Supervisor(
        [sys.executable, "-u", "-m", options.module, *forwarded],
        members,
        Restarts(restarted, options.restart_seconds),
        pin=options.pin,
        logs=options.logs,
    ).run()


def fleet_of(
    deployment: Deployment, processes: int = 1, apart: bool = False, standbys: int = 0
) -> list[Member]:
    """The processes of a deployment on free addresses, the router first. Each prefill worker and,
    except with `link.transport: pull`, each domain has `processes` processes.

    Args:
      apart: let every worker, and the pages server of every prefill worker, listen on another
        address than the dialled one; something else has to connect the two.
      standbys: further ffn workers, which take over when the active one ends.

    Raises:
      ConfigError: this launcher cannot start the deployment.
    """
    prefill, pull = deployment.prefill, deployment.topology.crosses_runtimes
    domains = deployment.domains if deployment.topology.separates_domains else 1
    if standbys and not pull:
        raise ConfigError(
            f"--standbys {standbys}: only ffn workers have them (link.transport: pull)"
        )
    workers = prefill.workers + domains + pull * (1 + standbys)
    every = [f"127.0.0.1:{port}" for port in free_ports(2 * workers if apart else workers)]
    addresses, listening = every[:workers], every[-workers:]
    prefills, rest = addresses[: prefill.workers], addresses[prefill.workers :]
    links = [f"127.0.0.1:{port}" for port in free_ports(2 * prefill.workers if apart else 0)]
    settings = [f"fleet.prefill={prefills}", f"fleet.domains={rest[:domains]}"]
    settings += ["fleet.registry=static"]
    if pull:
        if prefill.workers and deployment_of(deployment, "prefill").topology.crosses_runtimes:
            raise ConfigError(
                "prefill.mode: over link.transport = pull prefill workers would need ffn workers "
                "of their own; this launcher starts colocated ones"
            )
        if processes > 1 and not prefill.workers:
            raise ConfigError(
                f"--processes {processes}: over link.transport = pull a domain has one process, "
                "and there are no prefill workers"
            )
        settings.append(f"link.addresses={rest[domains:]}")
    shared = [word for setting in settings for word in ("--set", setting)]
    role = "attention" if pull else "decode"
    names = [(f"prefill worker {n}", "prefill", n) for n in range(prefill.workers)]
    names += [(f"domain {n}, role {role}", role, n) for n in range(domains)]
    members = [Member("router", [*shared, "--role", "router"], 0)]
    for runtime, (name, role, number) in enumerate(names, 1):
        arguments = [*shared, "--role", role, "--worker", f"{number}"]
        # Without prefill workers domains compute prompts, and without a domain the others.
        kind = "prefill" if role == "prefill" else "domain"
        worker = Member(name, arguments, runtime, role=kind, spared_by="domain")
        if links and role == "prefill":
            listens, dialled = links[2 * number : 2 * number + 2]
            arguments += ["--set", f"pages.listen={listens}", "--set", f"pages.address={dialled}"]
            worker = worker._replace(pages=(listens, dialled))
        members += _worker(
            worker,
            1 if role == "attention" else processes,
            listening[runtime - 1],
            addresses[runtime - 1],
        )
    for runtime in range(len(names) + 1, workers + 1):
        listens, dialled = listening[runtime - 1], addresses[runtime - 1]
        arguments = [*shared, "--role", "ffn", "--listen", listens]
        places = (listens, dialled) if apart else ()
        name = "standby" if runtime > len(names) + 1 else "ffn worker"
        members.append(Member(f"{name}, role ffn", arguments, runtime, *places))
    return members


def _worker(worker: Member, processes: int, listens: str, dialled: str) -> list[Member]:
    """The processes of one worker."""
    name, arguments = worker.name, worker.arguments
    if listens != dialled:
        worker = worker._replace(
            arguments=[*arguments, "--listen", listens], listens=listens, dialled=dialled
        )
    if processes == 1:
        return [worker]
    coordinator, control = (f"127.0.0.1:{port}" for port in free_ports(2))
    shared = ["--processes", f"{processes}", "--coordinator", coordinator, "--control", control]
    return [
        worker._replace(
            name=f"{name}, process {one}",
            arguments=[*worker.arguments, *shared, "--process-id", f"{one}"],
        )
        for one in range(processes)
    ]


def _deployment(forwarded: Sequence[str]) -> Deployment:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_deployment_arguments(parser)
    known, _ = parser.parse_known_args(forwarded)
    if known.config is None and known.model is None:
        raise ConfigError("--fleet: say --config or --model")
    elsewhere = ["fleet.prefill=[]", "fleet.domains=[]"]  # the file's addresses are not used here
    return read_deployment(known.config, known.model, [*known.set, *elsewhere])
