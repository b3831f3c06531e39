"""Cores and priorities of the processes of one deployment that share a host.

Cores: called by `host.py` for the processes of `--host-processes`, and by `serve.py` for tasks of
Slurm. Unbound, the threads of all processes wander over all sockets. Cores that the process may not
use, by cgroups or `taskset`, stay out. On a single socket of 2 cores it gains nothing: bound to a
core, the Python of a decode step took 1.16 ms of CPU, and 1.17 ms unbound (256 sequences,
2026-11-28).

Priorities: a process that the local launcher starts again beside others on the same cores may begin
with a lower one (`launch/local/supervisor.py`): loading and compiling then take the time that
serving leaves over.
"""

import contextlib
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

LEAST_CORES = 4
"""With fewer cores per process, all processes share all cores: process 0 needs more than others."""
_TOPOLOGY = Path("/sys/devices/system/cpu")


def bind(pid: int, number: int, count: int) -> None:
    """Binds a process, the `number`-th of `count` on this host, to its part of the cores."""
    if hasattr(os, "sched_setaffinity") and (cores := cores_of(number, count)):
        os.sched_setaffinity(pid, cores)


def bind_task(environment: Mapping[str, str] = os.environ) -> None:
    """Binds this process, if Slurm has started several tasks on the host without binding them.

    `launch` renders `--cpu-bind=cores`, which a site's plugins may ignore.
    """
    number, tasks = (environment.get(f"SLURM_{name}", "") for name in ("LOCALID", "TASKS_PER_NODE"))
    if not number or not (count := re.match(r"\d+", tasks)):
        return
    if len(os.sched_getaffinity(0)) == os.cpu_count():
        bind(0, int(number), int(count[0]))


def cores_of(number: int, count: int) -> list[int]:
    """Returns the cores of one process: neighbours in order of socket and physical core.

    Empty if each process would get fewer than `LEAST_CORES`.
    """
    cores = sorted(os.sched_getaffinity(0), key=_place)
    each = len(cores) // count
    return cores[number * each : (number + 1) * each] if each >= LEAST_CORES else []


def _place(core: int) -> tuple[int, int]:
    """Returns the socket and the physical core of a logical core, for sorting."""
    topology = _TOPOLOGY / f"cpu{core}" / "topology"
    try:
        socket, physical = (topology / "physical_package_id", topology / "core_id")
        return int(socket.read_text()), int(physical.read_text())
    except (OSError, ValueError):
        return 0, core


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
