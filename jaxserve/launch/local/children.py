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
from typing import IO, TextIO

from jaxserve.commands.children import started
from jaxserve.launch.local.spare import Spare

STOP_SECONDS = 5.0
"""Seconds between SIGTERM and SIGKILL for a process that should have ended already."""


def start(
    command: Sequence[str],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    process: int,
    pin: bool,
    log: Path | None = None,
    nicer: int = 0,
    spare: Spare | None = None,
) -> subprocess.Popen[bytes]:
    """Starts a process, or makes a spare the process. It ends when this launcher does.

    Args:
      command: common command line, before the process's own arguments.
      process: number of the process; `pin` binds it to the allowed core of that number.
      log: file to which output is appended; None: output is printed here, line by line, with the
        process's number.
      nicer: what is added to the niceness.
      spare: becomes the process if it lives.
    """
    cores = sorted(os.sched_getaffinity(0)) if pin else []
    core = cores[process % len(cores)] if cores else None
    with contextlib.ExitStack() as stack:
        if log is None:
            printed = (_printed(process, target) for target in (sys.stdout, sys.stderr))
            out, err = (stack.enter_context(each) for each in printed)
        else:
            out = err = stack.enter_context(log.open("ab"))
        taken = None
        if spare is not None:
            outputs = [out.fileno(), err.fileno()]
            taken = spare.become(arguments, environment, outputs, core, nicer)
        return taken or started(
            [*command, *arguments],
            signal.SIGTERM,
            core=core,
            nicer=nicer,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )


def _printed(process: int, target: TextIO) -> IO[bytes]:
    """Returns a pipe whose lines are printed with the number of the process that writes them."""
    source, pipe = os.pipe()
    copying = (process, os.fdopen(source, "rb"), target.buffer)
    threading.Thread(target=_copy, args=copying, daemon=True).start()
    return os.fdopen(pipe, "wb")


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
