"""Binds processes of one deployment that share a host to separate cores.

Called by `host.py` for the processes of `--host-processes`, and by `serve.py` for tasks of Slurm.
Without it the threads of all processes wander over all sockets. Cores that the process may not use,
by cgroups or `taskset`, stay out. On a single socket of 2 cores it gains nothing: bound to a core,
the Python of a decode step took 1.16 ms of CPU, and 1.17 ms unbound (256 sequences, 2026-11-28).
"""

import os
import re
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
