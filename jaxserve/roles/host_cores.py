"""The cores of this host that this process may use. Called by `fleet/sizing.py` and `doctor`."""

import os
from pathlib import Path

from jaxserve.roles.control_groups import control_groups


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use: those of its affinity, or fewer where a control group has
    a quota of CPU time. A part of a core counts only where it is all that the process has."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores: float = len(affinity(0)) if affinity else os.cpu_count() or 1
    for group in control_groups(root, "cpu"):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            try:
                quota, period = " ".join((group / name).read_text() for name in names).split()
                # "max" in version 2 and -1 in version 1 are no quota.
                if (part := float(quota) / float(period)) > 0:
                    cores = min(cores, part)
            except (OSError, ValueError):
                continue
    return max(1, int(cores))
