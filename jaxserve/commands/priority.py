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
    """Gives this process the niceness of `JAXSERVE_SERVING_NICE`, its session the usual one, and
    forgets the variable; raises as `renice`."""
    wanted = environment.pop(VARIABLE, None)
    if wanted is not None:
        renice(os.getpid(), int(wanted), 0)


def renice(process: int, niceness: int, group: int) -> None:
    """Gives every thread of a process a niceness, and its session one among sessions.

    Raises:
      PermissionError: it is lower than now, and this user may not have that.
    """
    with contextlib.suppress(FileNotFoundError):  # it has ended
        for thread in Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, int(thread.name), niceness)
    # Where the kernel shares cores between sessions first (sched(7)); others have no such file.
    for _ in range(TRIES):
        try:
            Path(f"/proc/{process}/autogroup").write_text(f"{group}")
        except BlockingIOError:  # users other than root may change one each 0.1 s
            time.sleep(0.1)
            continue
        except OSError:
            pass
        return
