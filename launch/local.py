"""Starts one deployment as several processes on this host.

    python launch/local.py --processes 2 --config configs/demo.yaml --set lanes=3

runs `python -m jaxserve.serve` (or `--module`) N times with the same arguments, joined over
loopback: what every host of a cluster would run, told apart by JAXSERVE_* variables. Lines of
output carry the number of their process. SIGINT and SIGTERM go to the leader, process 0, which
ends the others (a third one ends all at once); when a process dies, the leader has `--grace`
seconds to report it before everything is ended. The exit code is the leader's.

    python launch/local.py --runtimes --standbys 1 --config configs/demo.yaml --set lanes=3

starts attention and ffn as runtimes of their own (`runtimes.py`), which any of them outlives.

    python launch/local.py --fleet --config configs/demo-fleet.yaml

starts a router, prefill workers and domains (`fleet.py`), and with `link.transport: pull` an ffn
worker and `--standbys` further ones.
"""

import argparse
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import runtimes
from processes import STOP_SECONDS, describe, end, free_ports, print_output, say, start

FOLLOWER_SECONDS = 5.0
"""For the followers after the leader has ended: they see its connection close."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Starts the processes, waits for them, and returns the leader's exit code."""
    options, forwarded = _parse(sys.argv[1:] if arguments is None else arguments)
    if options.runtimes:
        return runtimes.run(options, forwarded)
    if options.fleet:
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
        import fleet  # it reads the deployment, with the package

        return fleet.run(options, forwarded)
    command = [sys.executable, "-u", "-m", options.module, *forwarded]
    processes: list[subprocess.Popen[bytes]] = []
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: signals.append(number))
    try:
        for process, environment in enumerate(_environments(options.processes)):
            processes.append(start(command, environment, process, options.pin))
        printers = print_output(dict(enumerate(processes)))
        code = _watch(processes, signals, options)
    finally:
        end(processes)
    for printer in printers:
        printer.join(STOP_SECONDS)
    return code


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="launch/local.py",
        description="Starts one deployment as several processes on this host.",
        epilog="All other arguments go to every process.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--processes",
        type=int,
        help="how many (2); with --fleet: of each worker (1), over link.transport pull of prefill "
        "workers alone",
    )
    parser.add_argument("--module", default="jaxserve.serve", help="what each runs (%(default)s)")
    parser.add_argument(
        "--runtimes",
        action="store_true",
        help="attention and ffn in runtimes of their own, joined by link.transport pull",
    )
    parser.add_argument(
        "--standbys",
        type=int,
        default=0,
        help="with --runtimes, or --fleet over link.transport pull: further ffn workers (0)",
    )
    parser.add_argument(
        "--fleet",
        action="store_true",
        help="a router, and the deployment's prefill workers and domains, a process each",
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="with --fleet: start processes again that have died",
    )
    parser.add_argument(
        "--restart-seconds",
        type=float,
        default=0.5,
        help="with --restart: from a death to the new start (%(default)g)",
    )
    parser.add_argument(
        "--apart",
        action="store_true",
        help="with --fleet: workers listen elsewhere than where others dial; it says where, and "
        "who started it connects the two",
    )
    parser.add_argument(
        "--logs", type=Path, help="with --fleet or --runtimes: a folder for what processes print"
    )
    parser.add_argument(
        "--peers",
        action="store_true",
        help="with --fleet or --runtimes: workers that start take their weights from running ones",
    )
    parser.add_argument("--pin", action="store_true", help="process i on the i-th core allowed")
    parser.add_argument(
        "--grace",
        type=float,
        default=60.0,
        help="seconds the leader has to report that another process ended (%(default)g)",
    )
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
    if options.restart_seconds < 0:
        parser.error(f"--restart-seconds {options.restart_seconds:g}: expected 0 or more")
    if options.peers and not (options.fleet or options.runtimes):
        parser.error("--peers: only with --fleet or --runtimes")
    if options.logs is not None and not (options.fleet or options.runtimes):
        parser.error("--logs: only with --fleet or --runtimes")
    if options.logs is not None and not options.logs.is_dir():
        parser.error(f"--logs {options.logs}: there is no such folder")
    if options.pin and not hasattr(os, "sched_setaffinity"):
        parser.error("--pin: this system cannot pin a process to a core")
    return options, forwarded


def _environments(processes: int) -> list[dict[str, str]]:
    """One environment a process: its number, the two addresses, a secret of this run."""
    coordinator, control = free_ports(2)
    shared = {
        **os.environ,
        "JAXSERVE_PROCESSES": str(processes),
        "JAXSERVE_COORDINATOR": f"127.0.0.1:{coordinator}",
        "JAXSERVE_CONTROL": f"127.0.0.1:{control}",
        "JAXSERVE_CLUSTER_TOKEN": secrets.token_hex(16),
    }
    return [{**shared, "JAXSERVE_PROCESS_ID": str(process)} for process in range(processes)]


def _watch(
    processes: Sequence[subprocess.Popen[bytes]], signals: list[int], options: argparse.Namespace
) -> int:
    """Waits until all have ended or the grace after the first end is over.

    Passes signals to the leader. Returns the leader's exit code, or 128 + signal.
    """
    deadline = float("inf")
    ended: set[int] = set()
    told = 0
    while len(ended) < len(processes):
        if signals:
            number, told = signals.pop(0), told + 1
            if told > 2:
                say("ending everything")
                break
            say(f"{signal.Signals(number).name}: telling process 0")
            processes[0].send_signal(number)
        for process, child in enumerate(processes):
            if process in ended or child.poll() is None:
                continue
            ended.add(process)
            if child.returncode:
                say(f"process {process} ended with {describe(child.returncode)}")
            grace = options.grace if process else FOLLOWER_SECONDS
            deadline = min(deadline, time.monotonic() + grace)
        if time.monotonic() > deadline:
            late = sorted(set(range(len(processes))) - ended)
            say(f"still there: process {', '.join(map(str, late))}; ending what is left")
            break
        time.sleep(0.05)
    code = processes[0].poll()
    if code is None:
        return 1
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main())
