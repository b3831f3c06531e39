"""Starts one deployment as several processes on this host.

    python launch/local.py --processes 2 --config configs/demo.yaml --set lanes=3

runs `python -m jaxserve.serve` (or `--module`) N times with the same arguments, joined over
loopback: what every host of a cluster would run, told apart by JAXSERVE_* variables. Lines of
output carry the number of their process. SIGINT and SIGTERM go to the leader, process 0, which
ends the others (a third one ends all at once); when a process dies, the leader has `--grace`
seconds to report it before everything is ended. The exit code is the leader's.
"""

import argparse
import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO

FOLLOWER_SECONDS = 5.0
"""For the followers after the leader has ended: they see its connection close."""
STOP_SECONDS = 5.0
"""Between the polite and the forced end of a process that should be gone already."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Starts the processes, waits for them, and returns the leader's exit code."""
    options, forwarded = _parse(sys.argv[1:] if arguments is None else arguments)
    command = [sys.executable, "-u", "-m", options.module, *forwarded]
    processes: list[subprocess.Popen[bytes]] = []
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: signals.append(number))
    try:
        for environment in _environments(options.processes):
            process = len(processes)
            processes.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    # A Ctrl-C reaches this process alone: the leader's drain needs the others.
                    start_new_session=True,
                    # No thread has been started yet.
                    preexec_fn=_prepare(process, options.pin),  # noqa: PLW1509
                )
            )
        printers = _print_output(processes)
        code = _watch(processes, signals, options)
    finally:
        _end(processes)
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
    parser.add_argument("--processes", type=int, default=2, help="how many (2)")
    parser.add_argument("--module", default="jaxserve.serve", help="what each runs (%(default)s)")
    parser.add_argument("--pin", action="store_true", help="process i on the i-th core allowed")
    parser.add_argument(
        "--grace",
        type=float,
        default=60.0,
        help="seconds the leader has to report that another process ended (%(default)g)",
    )
    options, forwarded = parser.parse_known_args(arguments)
    if options.processes < 1:
        parser.error(f"--processes {options.processes}: expected at least 1")
    if options.pin and not hasattr(os, "sched_setaffinity"):
        parser.error("--pin: this system cannot pin a process to a core")
    return options, forwarded


def _environments(processes: int) -> list[dict[str, str]]:
    """One environment a process: its number, the two addresses, a secret of this run."""
    coordinator, control = _free_ports(2)
    shared = {
        **os.environ,
        "JAXSERVE_PROCESSES": str(processes),
        "JAXSERVE_COORDINATOR": f"127.0.0.1:{coordinator}",
        "JAXSERVE_CONTROL": f"127.0.0.1:{control}",
        "JAXSERVE_CLUSTER_TOKEN": secrets.token_hex(16),
    }
    return [{**shared, "JAXSERVE_PROCESS_ID": str(process)} for process in range(processes)]


def _free_ports(count: int) -> list[int]:
    """Different ports of loopback that are free now."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def _prepare(process: int, pin: bool) -> Callable[[], None]:
    """What a process does before it becomes Python: be pinned, and end with this launcher."""
    launcher = os.getpid()
    cores = sorted(os.sched_getaffinity(0)) if pin else []
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def prepare() -> None:
        if pin:
            os.sched_setaffinity(0, {cores[process % len(cores)]})
        if libc is not None:
            set_parent_death_signal = 1
            libc.prctl(set_parent_death_signal, signal.SIGTERM)
            if os.getppid() != launcher:
                os._exit(1)

    return prepare


def _print_output(processes: Sequence[subprocess.Popen[bytes]]) -> list[threading.Thread]:
    """Copies the output of every process, line by line, with its number in front."""
    lock = threading.Lock()

    def copy(process: int, source: IO[bytes], target: IO[bytes]) -> None:
        for line in source:
            with lock, contextlib.suppress(OSError, ValueError):
                target.write(f"[{process}] ".encode() + line.rstrip(b"\n") + b"\n")
                target.flush()

    printers = []
    for process, child in enumerate(processes):
        for source, target in ((child.stdout, sys.stdout), (child.stderr, sys.stderr)):
            assert source is not None
            printer = threading.Thread(
                target=copy, args=(process, source, target.buffer), daemon=True
            )
            printer.start()
            printers.append(printer)
    return printers


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
                _say("ending everything")
                break
            _say(f"{signal.Signals(number).name}: telling process 0")
            processes[0].send_signal(number)
        for process, child in enumerate(processes):
            if process in ended or child.poll() is None:
                continue
            ended.add(process)
            if child.returncode:
                _say(f"process {process} ended with {_describe(child.returncode)}")
            grace = options.grace if process else FOLLOWER_SECONDS
            deadline = min(deadline, time.monotonic() + grace)
        if time.monotonic() > deadline:
            late = sorted(set(range(len(processes))) - ended)
            _say(f"still there: process {', '.join(map(str, late))}; ending what is left")
            break
        time.sleep(0.05)
    code = processes[0].poll()
    if code is None:
        return 1
    return 128 - code if code < 0 else code


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends what is left: asks the followers, then the leader; forces whoever does not listen."""
    left = [child for child in reversed(processes) if child.poll() is None]
    for child in left:
        child.terminate()
    deadline = time.monotonic() + STOP_SECONDS
    for child in left:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _describe(code: int) -> str:
    return f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"


def _say(text: str) -> None:
    print(f"[local] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
