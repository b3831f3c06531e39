"""Several processes on one host, a part of its devices each: `serve --host-processes N`.

The host time of a message between the roles grows with the devices that one process owns, hardly
with those of the other side, so a process a GPU is the fastest way to run a runtime of several
hosts (`docs/measurements/serving.md`). The process that was started this way loads nothing:
it starts the others, passes signals on, and ends with them. It takes the numbers of the hosts
(`--process-id`, `--processes`, from flags, the environment or the cluster) and gives the processes
theirs; a host on its own needs none.
"""

import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from jaxserve.commands.children import started
from jaxserve.commands.cores import bind
from jaxserve.config.deployment import Deployment
from jaxserve.errors import ConfigError
from jaxserve.fleet.arguments import TOKEN_VARIABLE, ProcessArguments
from jaxserve.ports import free_ports

LAST_WORDS_SECONDS = 120.0
"""For the others to end after the first has: the leader says why first."""
LOOK_SECONDS = 0.05

logger = logging.getLogger("jaxserve.serve")


def run_processes(
    deployment: Deployment, process: ProcessArguments, arguments: Sequence[str]
) -> int:
    """Runs this host's processes until all have ended.

    Args:
      process: number of this host, and number of hosts.
      arguments: command-line arguments of this command.

    Returns:
      The exit code of the first process that ended with a code other than 0; else 0.

    Raises:
      ConfigError: the roles have their own runtimes, of which each host runs one process.
    """
    if deployment.topology.crosses_runtimes or process.role == "router":
        raise ConfigError(
            f"--host-processes {process.host_processes}: of a router, and of a worker over "
            f"link.transport = {deployment.link.transport}, a host runs one process"
        )
    children = start(process, "jaxserve.serve", arguments)
    for number, child in enumerate(children):
        bind(child.pid, number, len(children))
    return _watch(children)


def start(
    process: ProcessArguments, module: str, arguments: Sequence[str], **options: Any
) -> list[subprocess.Popen[bytes]]:
    """Starts a module once for each process of this host. Those of a host on its own find each
    other on loopback, by a secret of their own.

    Args:
      arguments: command-line arguments of this command.
      options: of `subprocess.Popen`.
    """
    environment = dict(os.environ)
    if process.processes == 1:
        coordinator, control = (f"127.0.0.1:{port}" for port in free_ports(2))
        process = msgspec.structs.replace(process, coordinator=coordinator, control_address=control)
        environment[TOKEN_VARIABLE] = process.token or secrets.token_hex(16)
    python = [sys.executable, "-u", "-m", module]
    return [
        started([*python, *given], signal.SIGTERM, env=environment, **options)
        for given in commands(process, arguments)
    ]


def commands(process: ProcessArguments, arguments: Sequence[str]) -> list[list[str]]:
    """Arguments of each process of this host: those of this command, then its own, which win.

    Only the first of a host answers probes: the others would need ports of their own.
    """
    count = process.host_processes
    given = [each for each in arguments if each != "--distributed"]
    shared = {
        "--host-processes": "1",
        "--processes": f"{process.processes * count}",
        "--slices": "1",
        "--slice": "0",
        "--coordinator": process.coordinator,
        "--control": process.control_address,
    }
    if process.control_bind:
        shared["--control-bind"] = process.control_bind
    silent = [f"--set=server.follower_{face}_port=-1" for face in ("grpc", "http")]
    made = []
    for number in range(count):
        own = {
            "--process-id": f"{process.process_id * count + number}",
            "--host-process": f"{number}",
        }
        flags = [word for pair in {**shared, **own}.items() for word in pair]
        made.append([*given, *flags, *(silent if number else [])])
    return made


def _watch(children: Sequence[subprocess.Popen[bytes]]) -> int:
    """Until all have ended. A signal goes to the first, which drains the deployment, or has its
    leader drain it; a second one ends all at once."""
    signals: list[int] = []
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda number, frame: signals.append(number))
    failed, told, deadline = 0, 0, float("inf")
    while any(child.poll() is None for child in children):
        if signals:
            number, told = signals.pop(0), told + 1
            for child in children if told > 1 else children[:1]:
                child.send_signal(number)
        ended = [child.returncode for child in children if child.returncode is not None]
        failed = failed or next((code for code in ended if code), 0)
        if ended:
            deadline = min(deadline, time.monotonic() + LAST_WORDS_SECONDS)
        if time.monotonic() > deadline:
            logger.error("processes of this host are still there; ending them")
            for child in children:
                child.kill()
        time.sleep(LOOK_SECONDS)
    failed = failed or next((child.returncode for child in children if child.returncode), 0)
    return 128 - failed if failed < 0 else failed
