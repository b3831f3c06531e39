"""Attention and ffn as runtimes of their own on this host: `local.py --runtimes`.

One process plays attention and serves, one is the ffn worker it uses, and each of `--standbys` is
an ffn worker that waits to take over. What a service manager does on a cluster is done here: an ffn
worker that dies is started again. The attention runtime's end is the end of all.
"""

import argparse
import sys
from collections.abc import Sequence

from processes import free_ports
from supervisor import Member, Restarts, Supervisor, with_peers

RESTART_SECONDS = 0.1
"""Before a worker that died is started again, so that one that cannot start does not spin."""


def run(options: argparse.Namespace, forwarded: Sequence[str]) -> int:
    """Starts all, restarts ffn workers, and returns the attention process's exit code."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(1 + options.standbys)]
    command = [sys.executable, "-u", "-m", options.module, *forwarded]
    for setting in (
        "attention.runtime=attention",
        "ffn.runtime=ffn",
        "link.transport=pull",
        f"link.addresses={addresses}",
    ):
        command += ["--set", setting]
    members = [Member("role attention, runtime attention", ["--role", "attention"], 0)]
    for runtime, address in enumerate(addresses, 1):
        arguments = ["--role", "ffn", "--listen", address]
        members.append(Member("role ffn, runtime ffn", arguments, runtime))
    members = with_peers(members) if options.peers else members
    restarts = Restarts(range(1, len(members)), RESTART_SECONDS, hopeless=(1, 2))
    return Supervisor(command, members, restarts, pin=options.pin, logs=options.logs).run()
