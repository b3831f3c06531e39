"""A fleet on this host: `local.py --fleet`, a process each for router, prefill workers and domains.

How many there are is what the deployment says (`prefill.workers`, `domains`); with `link.transport:
pull` an ffn worker serves the domains. All listen on free ports of loopback, whatever addresses
the deployment has. The router's end is the end of all. A worker that dies stays dead, unless
`--restart` says otherwise: then it is started again, as a service manager would.
"""

import argparse
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from processes import STOP_SECONDS, describe, end, free_ports, print_output, say, start

from jaxserve.config.command_line import add_deployment_arguments, read_deployment
from jaxserve.config.deployment import Deployment
from jaxserve.errors import ConfigError

RESTART_SECONDS = 0.5
"""Before a worker is started again, so that one that cannot start does not spin."""
MOST_RESTARTS_A_MINUTE = 60


class Member(NamedTuple):
    """A process of the fleet."""

    name: str
    arguments: list[str]


def run(options: argparse.Namespace, forwarded: Sequence[str]) -> int:
    """Starts all, says who is who, and returns the router's exit code."""
    try:
        members = fleet_of(_deployment(forwarded), options.processes)
    except ConfigError as error:
        say(f"{error}")
        return 2
    environment = {**os.environ, "JAXSERVE_CLUSTER_TOKEN": secrets.token_hex(16)}
    command = [sys.executable, "-u", "-m", options.module, *forwarded]
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: signals.append(number))

    def begin(process: int) -> subprocess.Popen[bytes]:
        member = members[process]
        child = start([*command, *member.arguments], environment, process, options.pin)
        print_output({process: child})
        say(f"process {process}: {member.name}, pid {child.pid}")
        return child

    processes: list[subprocess.Popen[bytes]] = []
    ended: set[int] = set()
    restarts: list[float] = []
    try:
        for process in range(len(members)):
            processes.append(begin(process))
        while processes[0].poll() is None:
            if signals:
                processes[0].send_signal(signals.pop(0))
            for process in range(1, len(members)):
                if process in ended or processes[process].poll() is None:
                    continue
                how = describe(processes[process].returncode)
                said = f"process {process} ({members[process].name}) ended with {how}"
                if not options.restart:
                    say(f"{said}; it is not started again (--restart)")
                    ended.add(process)
                    continue
                say(f"{said}; starting it again")
                restarts = [at for at in restarts if at > time.monotonic() - 60.0]
                if len(restarts) >= MOST_RESTARTS_A_MINUTE or processes[process].returncode == 2:
                    say(f"process {process} does not stay; ending everything")
                    return 1
                restarts.append(time.monotonic())
                time.sleep(RESTART_SECONDS)
                processes[process] = begin(process)
            time.sleep(0.02)
        code = processes[0].returncode
        return 128 - code if code < 0 else code
    finally:
        end(processes)
        time.sleep(STOP_SECONDS / 50)  # for the last lines


def fleet_of(deployment: Deployment, processes: int = 1) -> list[Member]:
    """The processes of a deployment, the router first, on addresses that are free now; so many of
    each prefill worker and domain.

    Raises:
      ConfigError: it is not one that this launcher can start.
    """
    prefill, pull = deployment.prefill, deployment.link.transport == "pull"
    apart = pull or deployment.mode == "colocated"
    domains = deployment.domains if apart else 1
    ports = free_ports(prefill.workers + domains + pull)
    addresses = [f"127.0.0.1:{port}" for port in ports]
    prefills, rest = addresses[: prefill.workers], addresses[prefill.workers :]
    settings = [f"fleet.prefill={prefills}", f"fleet.domains={rest[:domains]}"]
    settings += ["fleet.registry=static"]
    if pull:
        if prefill.workers and prefill.mode != "colocated":
            raise ConfigError(
                "prefill.mode: over link.transport = pull prefill workers would need ffn workers "
                "of their own; this launcher starts colocated ones"
            )
        if processes > 1:
            raise ConfigError(
                f"--processes {processes}: over link.transport = pull a worker has one process"
            )
        settings.append(f"link.addresses={rest[domains:]}")
    shared = [word for setting in settings for word in ("--set", setting)]
    role = "attention" if pull else "decode"
    members = [Member("router", [*shared, "--role", "router"])]
    for number in range(prefill.workers):
        arguments = [*shared, "--role", "prefill", "--worker", f"{number}"]
        members += _worker(f"prefill worker {number}", arguments, processes)
    for number in range(domains):
        arguments = [*shared, "--role", role, "--worker", f"{number}"]
        members += _worker(f"domain {number}, role {role}", arguments, processes)
    if pull:
        arguments = [*shared, "--role", "ffn", "--listen", rest[domains]]
        members.append(Member("ffn worker, role ffn", arguments))
    return members


def _worker(name: str, arguments: list[str], processes: int) -> list[Member]:
    """The processes of one worker."""
    if processes == 1:
        return [Member(name, arguments)]
    coordinator, control = (f"127.0.0.1:{port}" for port in free_ports(2))
    shared = ["--processes", f"{processes}", "--coordinator", coordinator, "--control", control]
    return [
        Member(f"{name}, process {one}", [*arguments, *shared, "--process-id", f"{one}"])
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
