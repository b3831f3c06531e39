"""Child processes that do not outlive the process that started them.

Called by whoever starts processes: `host.py`, the launcher, benchmarks.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable


def ending_with_parent(number: signal.Signals) -> Callable[[], None]:
    """What a child of this process does before exec: on Linux it gets the signal when this process
    ends in whatever way. It makes system calls alone."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    parent = os.getpid()

    def prepare() -> None:
        if libc is not None:
            set_parent_death_signal = 1
            libc.prctl(set_parent_death_signal, number)
            if os.getppid() != parent:
                os._exit(1)

    return prepare
