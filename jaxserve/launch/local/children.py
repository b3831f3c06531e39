"""Child processes of the local launcher, none of which outlives it; called by `supervisor.py`."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from jaxserve.commands.children import ending_with_parent

STOP_SECONDS = 5.0
"""Seconds between SIGTERM and SIGKILL for a process that should have ended already."""


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    process: int,
    pin: bool,
    log: Path | None = None,
    nicer: int = 0,
) -> subprocess.Popen[bytes]:
    """Starts a process that ends with this launcher.

    Args:
      process: number of the process; `pin` binds it to the allowed core of that number.
      log: file to which output is appended; None: output is printed here, line by line, with the
        process's number.
      nicer: what is added to the niceness.
    """
    with contextlib.ExitStack() as stack:
        file = None if log is None else stack.enter_context(log.open("ab"))
        child = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file or subprocess.PIPE,
            stderr=file or subprocess.PIPE,
            # A Ctrl-C reaches only the launcher, which decides which processes to signal.
            start_new_session=True,
            # `prepare` makes only system calls, so locks of printing threads do no harm.
            preexec_fn=_prepare(process, pin, nicer),  # noqa: PLW1509
        )
    for source, target in ((child.stdout, sys.stdout), (child.stderr, sys.stderr)):
        if source is not None:
            copying = (process, source, target.buffer)
            threading.Thread(target=_copy, args=copying, daemon=True).start()
    return child


def _prepare(process: int, pin: bool, nicer: int) -> Callable[[], None]:
    """Returns what a child runs before `exec`: it binds the process to a core, sets its niceness,
    and lets it end with this launcher."""
    cores = sorted(os.sched_getaffinity(0)) if pin else []
    end_with_launcher = ending_with_parent(signal.SIGTERM)

    def prepare() -> None:
        if pin:
            os.sched_setaffinity(0, {cores[process % len(cores)]})
        if nicer:
            os.nice(nicer)
            # With autogrouping, sessions share cores regardless of niceness (sched(7)).
            with contextlib.suppress(OSError):
                Path("/proc/self/autogroup").write_text(f"{nicer}")
        end_with_launcher()

    return prepare


_printing = threading.Lock()


def _copy(process: int, source: IO[bytes], target: IO[bytes]) -> None:
    with source:
        for line in source:
            with _printing, contextlib.suppress(OSError, ValueError):
                target.write(f"[{process}] ".encode() + line.rstrip(b"\n") + b"\n")
                target.flush()


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends the remaining processes: SIGTERM to the followers, then the leader; SIGKILL to processes
    that do not end in time."""
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
    """Describes how a process ended: its exit code or signal."""
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def say(text: str) -> None:
    """Prints a line of the launcher itself."""
    print(f"[local] {text}", file=sys.stderr, flush=True)
