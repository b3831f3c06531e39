"""Starts child processes that do not outlive this one.

Called by `host.py`, the launcher, preflight, benchmarks and chaos.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
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
