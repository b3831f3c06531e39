"""The memory of this host, which simulated devices share. Called before anything is loaded
(`engine/open_model.py`, `fleet/role_runtime.py`) and where sizes are chosen (`fleet/sizing.py`)."""

import os
from collections.abc import Mapping
from pathlib import Path

from jaxserve.config.deployment import Deployment
from jaxserve.config.model import ModelConfig
from jaxserve.mesh import Role
from jaxserve.roles.capacity import role_bytes

GROUPS = (
    ("", "memory.max", "memory.current", ""),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
"""Of control groups, version 2 and 1: folder, limit, what is used, and how entries of memory.stat
begin that count the groups inside, too."""


def free_host_memory(root: Path = Path("/")) -> int | None:
    """Bytes of the host's memory that nobody needs, of the container's where it has fewer: what was
    read of files and stays in memory is free in both, since the kernel drops it first."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") or None
    sizes = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    for folder, *names, prefix in GROUPS:
        group = root / "sys/fs/cgroup" / folder
        try:
            limit, used = (int((group / name).read_text()) for name in names)
            entries = dict(map(str.split, (group / "memory.stat").read_text().splitlines()))
        except (OSError, ValueError):  # the other version, or no limit ("max")
            continue
        files = sum(int(entries.get(f"{prefix}{name}_file", 0)) for name in ("active", "inactive"))
        sizes.append(max(0, limit - used + files))
    return min(sizes, default=None)


def simulated_memory(
    config: ModelConfig, deployment: Deployment, devices: Mapping[Role, int], free: int | None
) -> dict[Role, int | None]:
    """What of `free` bytes is left for a simulated device of each role, once the others have what
    they need: less than it weighs, if together they weigh more.

    Args:
      devices: how many of each role are here.
    """
    if free is None:
        return dict.fromkeys(devices)
    needed = {
        part.role: part.total * devices.get(part.role, 0) for part in role_bytes(config, deployment)
    }
    spare = free - sum(needed.values())
    return {role: max(0, spare + needed.get(role, 0)) // count for role, count in devices.items()}
