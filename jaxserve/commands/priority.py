"""Priorities of the local launcher's child processes.

A process that is started again beside others on the same cores may begin with a lower priority
(`launch/local/supervisor.py`): loading and compiling then take the time that serving leaves over.
"""

import contextlib
import os
import time
from pathlib import Path

TRIES = 20


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
