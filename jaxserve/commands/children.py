"""Child processes that do not outlive the process that started them.

Called by `host.py`, the launcher and benchmarks.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable


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
