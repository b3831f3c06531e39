"""Starts child processes that do not outlive this one.

Called by `host.py`, the launcher, preflight, benchmarks and chaos.
"""

import contextlib
import ctypes
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxserve.ports import listening

PORTS = range(10_000, 30_000)
"""Ports for children. Linux gives those from 32768 to any connection, so that one which is free now
may be taken when a child listens there; Kubernetes' own begin at 30000."""


def free_addresses(count: int) -> list[str]:
    """Returns different addresses on loopback that are free now, for children to listen at."""
    found: list[str] = []
    for port in random.sample(PORTS, len(PORTS)):
        if len(found) == count:
            break
        with contextlib.suppress(OSError), listening("127.0.0.1", port):
            found.append(f"127.0.0.1:{port}")
    return found


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
