"""Attention and ffn as runtimes of their own on this host: `local.py --runtimes`.

One process plays attention and serves, one is the ffn worker it uses, and each of `--standbys` is
an ffn worker that waits to take over. What a service manager does on a cluster is done here: an ffn
worker that dies is started again. The attention runtime's end is the end of all.
"""

import argparse
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from processes import STOP_SECONDS, describe, end, free_ports, print_output, say, start

RESTART_SECONDS = 0.1
"""Before a worker that died is started again, so that one that cannot start does not spin."""
MOST_RESTARTS_A_MINUTE = 120


def run(options: argparse.Namespace, forwarded: Sequence[str]) -> int:
    """Starts all, restarts ffn workers, and returns the attention process's exit code."""
    environment = {**os.environ, "JAXSERVE_CLUSTER_TOKEN": secrets.token_hex(16)}
    addresses = [f"127.0.0.1:{port}" for port in free_ports(1 + options.standbys)]
    command = [sys.executable, "-u", "-m", options.module, *forwarded]
    for setting in (
        "attention.runtime=attention",
        "ffn.runtime=ffn",
        "link.transport=pull",
        f"link.addresses={addresses}",
    ):
        command += ["--set", setting]
    roles = [["--role", "attention"]]
    roles += [["--role", "ffn", "--listen", address] for address in addresses]
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: signals.append(number))
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for process, role in enumerate(roles):
            processes.append(_start(command, role, environment, process, options.pin))
        restarts: list[float] = []
        while processes[0].poll() is None:
            if signals:
                processes[0].send_signal(signals.pop(0))
            for process, role in enumerate(roles):
                if process and processes[process].poll() is not None:
                    code = processes[process].returncode
                    say(f"process {process} (ffn) ended with {describe(code)}; starting it again")
                    restarts = [at for at in restarts if at > time.monotonic() - 60.0]
                    if len(restarts) >= MOST_RESTARTS_A_MINUTE or code in (1, 2):
                        say(f"process {process} does not stay; ending everything")
                        return 1
                    restarts.append(time.monotonic())
                    time.sleep(RESTART_SECONDS)
                    processes[process] = _start(command, role, environment, process, options.pin)
            time.sleep(0.02)
        code = processes[0].returncode
        return 128 - code if code < 0 else code
    finally:
        end(processes)
        time.sleep(STOP_SECONDS / 50)  # for the last lines


def _start(
    command: Sequence[str],
    role: Sequence[str],
    environment: dict[str, str],
    process: int,
    pin: bool,
) -> subprocess.Popen[bytes]:
    child = start([*command, *role], environment, process, pin)
    print_output({process: child})
    say(f"process {process}: role {role[1]}, runtime {role[1]}, pid {child.pid}")
    return child
