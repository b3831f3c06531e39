"""Child processes of the launchers: started so that none outlives them, their output side by side.

Used by `local.py` and `supervisor.py`.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from jaxserve.commands.children import ending_with_parent

STOP_SECONDS = 5.0
"""Between the polite and the forced end of a process that should be gone already."""


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    process: int,
    pin: bool,
    log: Path | None = None,
    nicer: int = 0,
) -> subprocess.Popen[bytes]:
    """Starts a process that ends with this launcher; with `pin`, on the core of its number; `nicer`
    than this launcher. What it prints comes through pipes, or goes to the end of a file."""
    with contextlib.ExitStack() as stack:
        file = None if log is None else stack.enter_context(log.open("ab"))
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file or subprocess.PIPE,
            stderr=file or subprocess.PIPE,
            # A Ctrl-C reaches the launcher alone, which decides who is told.
            start_new_session=True,
            # It makes system calls alone, so threads that print do no harm.
            preexec_fn=_prepare(process, pin, nicer),  # noqa: PLW1509
        )


def free_ports(count: int) -> list[int]:
    """Different ports of loopback that are free now."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def _prepare(process: int, pin: bool, nicer: int) -> Callable[[], None]:
    """What a process does before it becomes Python: be pinned, be nice, end with this launcher."""
    cores = sorted(os.sched_getaffinity(0)) if pin else []
    end_with_launcher = ending_with_parent(signal.SIGTERM)

    def prepare() -> None:
        if pin:
            os.sched_setaffinity(0, {cores[process % len(cores)]})
        if nicer:
            os.nice(nicer)
            # Where sessions share the cores equally, whatever their processes' niceness (sched(7)).
            with contextlib.suppress(OSError):
                Path("/proc/self/autogroup").write_text(f"{nicer}")
        end_with_launcher()

    return prepare


_printing = threading.Lock()


def print_output(processes: Mapping[int, subprocess.Popen[bytes]]) -> list[threading.Thread]:
    """Copies the output of processes, line by line, with their numbers in front."""

    def copy(process: int, source: IO[bytes], target: IO[bytes]) -> None:
        with source:
            for line in source:
                with _printing, contextlib.suppress(OSError, ValueError):
                    target.write(f"[{process}] ".encode() + line.rstrip(b"\n") + b"\n")
                    target.flush()

    printers = []
    for process, child in processes.items():
        for source, target in ((child.stdout, sys.stdout), (child.stderr, sys.stderr)):
            assert source is not None
            printer = threading.Thread(
                target=copy, args=(process, source, target.buffer), daemon=True
            )
            printer.start()
            printers.append(printer)
    return printers


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
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


def describe(code: int) -> str:
    """How a process ended, in words."""
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def say(text: str) -> None:
    """A line of the launcher itself."""
    print(f"[local] {text}", file=sys.stderr, flush=True)
