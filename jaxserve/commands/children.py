"""Starts child processes that do not outlive this one.

Called by `host.py`, the launcher, preflight, benchmarks and chaos.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def started(
    command: Sequence[str],
    number: signal.Signals = signal.SIGKILL,
    *,
    core: int | None = None,
    nicer: int = 0,
    **options: Any,
) -> subprocess.Popen[Any]:
    """Starts a process that gets the signal when this one ends; Ctrl-C reaches this one alone.

    Args:
      core: the only core that it may use; None: all cores of this process.
      nicer: added to its niceness.
      options: of `subprocess.Popen`.
    """
    with_parent = ending_with_parent(number)

    def prepare() -> None:  # makes system calls alone, so locks of other threads do no harm
        if core is not None:
            os.sched_setaffinity(0, {core})
        if nicer:
            os.nice(nicer)
            # With autogrouping, sessions share cores regardless of niceness (sched(7)).
            with contextlib.suppress(OSError):
                Path("/proc/self/autogroup").write_text(f"{nicer}")
        with_parent()

    return subprocess.Popen(
        command,
        preexec_fn=prepare,  # noqa: PLW1509
        **{"start_new_session": True, **options},
    )


def ending_with_parent(number: signal.Signals) -> Callable[[], None]:
    """Returns the work of a child of this process before exec: on Linux it arranges that the child
    gets the signal when this process ends, in whatever way. It makes system calls alone."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    parent = os.getpid()

    def prepare() -> None:
        if libc is not None:
            set_parent_death_signal = 1
            libc.prctl(set_parent_death_signal, number)
            if os.getppid() != parent:
                os._exit(1)

    return prepare


class Child:
    """A process of Python that leads a session of its own, and its output, in a file.

    Args:
      arguments: of Python.
      output: file for the output.
      core: see `started`.
      environment: on top of this process's own.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        output: Path,
        *,
        core: int | None = None,
        environment: Mapping[str, str] | None = None,
    ):
        self.output = output
        with output.open("wb") as target:
            self._process = started(
                [sys.executable, *arguments],
                core=core,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=target,
                stderr=subprocess.STDOUT,
            )

    @property
    def code(self) -> int | None:
        """Exit code; None while the process runs."""
        return self._process.poll()

    def end(self) -> None:
        """Kills the process and all its children."""
        end(self._process)

    def last_words(self, most: int = 12) -> list[str]:
        """Returns the last lines of the output, without empty ones."""
        lines = self.output.read_text(errors="replace").splitlines()
        return [line for line in lines if line.strip()][-most:]


def end(process: subprocess.Popen[Any]) -> None:
    """Kills a process that leads its own session, and all its children."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
