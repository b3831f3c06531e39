"""Child processes of the local launcher, none of which outlives it; called by `supervisor.py`."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from jaxserve.commands.children import started

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
        cores = sorted(os.sched_getaffinity(0)) if pin else []
        child = started(
            command,
            signal.SIGTERM,
            core=cores[process % len(cores)] if cores else None,
            nicer=nicer,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file or subprocess.PIPE,
            stderr=file or subprocess.PIPE,
        )
    for source, target in ((child.stdout, sys.stdout), (child.stderr, sys.stderr)):
        if source is not None:
            copying = (process, source, target.buffer)
            threading.Thread(target=_copy, args=copying, daemon=True).start()
    return child


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
