"""The priority that a process takes when it has started.

A launcher that starts a process again beside others on the same cores may begin it with a lower
priority (`launch/supervisor.py`): loading and compiling then take what those who serve leave over.
"""

import contextlib
import os
import time
from collections.abc import MutableMapping
from pathlib import Path

VARIABLE = "JAXSERVE_SERVING_NICE"
"""Niceness from when the process is ready; not set: it stays as it is."""
TRIES = 20


def take_serving_priority(environment: MutableMapping[str, str] = os.environ) -> None:
    """Gives every thread of this process the niceness of `JAXSERVE_SERVING_NICE`, its session the
    usual one, and forgets it.

    Raises:
      PermissionError: it is lower than now, and this user may not have that.
    """
    wanted = environment.pop(VARIABLE, None)
    if wanted is None:
        return
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, int(thread.name), int(wanted))
    # Where the kernel shares cores between sessions first (sched(7)); others have no such file.
    for _ in range(TRIES):
        try:
            Path("/proc/self/autogroup").write_text("0")
        except BlockingIOError:  # users other than root may change one each 0.1 s
            time.sleep(0.1)
            continue
        except OSError:
            pass
        return
