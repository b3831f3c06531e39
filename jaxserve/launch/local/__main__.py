"""Starts one deployment as several processes on this host.

    jaxserve launch --target local --processes 2 --config demo --set lanes=3

runs `python -m jaxserve.serve` (or `--module`) N times with the same arguments, joined over
loopback: what every host of a cluster would run, told apart by JAXSERVE_* variables. Lines of
output carry the number of their process. SIGINT and SIGTERM go to the leader, process 0, which
ends the others (a third one ends all at once); when a process dies, the leader has `--grace`
seconds to report it before everything is ended. The exit code is the leader's.

    jaxserve launch --target local --runtimes --standbys 1 --config demo --set lanes=3

starts attention and ffn as runtimes of their own, of `attention.processes` and `ffn.processes`
processes each. An ffn worker that dies is started again; the attention runtime's end is the end of
all.

    jaxserve launch --target local --fleet --config demo-fleet

starts a process each for router, prefill workers and domains, as many as the deployment says, and
with `link.transport: pull` an ffn worker and `--standbys` further ones. The router's end is the end
of all. A process that dies stays dead, unless `--restart` is given: then it is started again, the
router included, and a worker of several processes as a whole. A worker takes a spare (`spare.py`),
a process that has imported everything already; another one is then prepared. With `--warm-spares`
each role has spares that have also compiled its programs.
"""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from jaxserve.config.command_line import add_options
from jaxserve.errors import ConfigError
from jaxserve.launch.local.children import say
from jaxserve.launch.local.members import (
    Member,
    deployment_for,
    fleet_of,
    rehearsal,
    roles_apart,
    runtime_of,
    with_peers,
)
from jaxserve.launch.local.supervisor import Rules, Supervisor

FOLLOWER_SECONDS = 5.0
"""For the followers after the leader has ended: they see its connection close."""
RUNTIME_SECONDS = 0.1
"""Before an ffn worker that died is started again, so that one that cannot start does not spin."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Starts the processes, waits for them, and returns the first one's exit code."""
    options, forwarded = _parse(sys.argv[1:] if arguments is None else arguments)
    try:
        if options.rehearse:
            forwarded += rehearsal(deployment_for(forwarded, options.runtimes))
        members, rules = _members(options, forwarded)
    except ConfigError as error:
        say(f"{error}")
        return 2
    command = [sys.executable, "-u", "-m", options.module, *forwarded]
    return Supervisor(command, members, rules, pin=options.pin, logs=options.logs).run()


def _members(options: argparse.Namespace, forwarded: Sequence[str]) -> tuple[list[Member], Rules]:
    spares: Literal["imported", "warm"] = "warm" if options.warm_spares else "imported"
    if options.runtimes:
        deployment = deployment_for(forwarded, apart=True)
        members = roles_apart(deployment, options.standbys)
        ffn = [number for number, member in enumerate(members) if member.runtime]
        # One of several processes may end because another did.
        hopeless = (2,) if deployment.ffn.processes > 1 else (1, 2)
        rules = Rules(ffn, RUNTIME_SECONDS, hopeless=hopeless, spares=spares)
        return with_peers(members) if options.peers else members, rules
    if options.fleet:
        deployment = deployment_for(forwarded)
        members = fleet_of(deployment, options.processes, options.apart, options.standbys)
        if options.peers:
            members = [members[0], *with_peers(members[1:])]
        return members, Rules(
            range(len(members)) if options.restart else (), options.restart_seconds, spares=spares
        )
    members = runtime_of(options.processes, Member("", [], 0))
    return members, Rules(grace=options.grace, followers=FOLLOWER_SECONDS)


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="jaxserve launch --target local",
        description="Starts one deployment as several processes on this host.",
        epilog="All other arguments go to every process.",
        allow_abbrev=False,
    )
    add_options(parser, Path(__file__).with_name("options.yaml"))
    options, forwarded = parser.parse_known_args(arguments)
    if options.processes is None:
        options.processes = 1 if options.fleet else 2
    if options.processes < 1:
        parser.error(f"--processes {options.processes}: expected at least 1")
    if options.standbys < 0 or (options.standbys and not (options.runtimes or options.fleet)):
        parser.error(
            f"--standbys {options.standbys}: expected 0 or more, with --runtimes or --fleet"
        )
    if options.fleet and options.runtimes:
        parser.error("--fleet and --runtimes: a fleet has runtimes of its own")
    for name in ("restart", "apart"):
        if getattr(options, name) and not options.fleet:
            parser.error(f"--{name}: only with --fleet")
    if options.warm_spares and not (options.restart or options.runtimes):
        parser.error("--warm-spares: only with --runtimes or --restart")
    for name in ("restart_seconds", "grace"):
        if not 0 <= (value := getattr(options, name)) < math.inf:
            parser.error(f"--{name.replace('_', '-')} {value:g}: expected 0 or more")
    if options.peers and not (options.fleet or options.runtimes):
        parser.error("--peers: only with --fleet or --runtimes")
    if options.logs is not None and not (options.fleet or options.runtimes):
        parser.error("--logs: only with --fleet or --runtimes")
    if options.logs is not None and not options.logs.is_dir():
        parser.error(f"--logs {options.logs}: there is no such folder")
    if options.pin and not hasattr(os, "sched_setaffinity"):
        parser.error("--pin: this system cannot pin a process to a core")
    return options, forwarded


if __name__ == "__main__":
    sys.exit(main())
