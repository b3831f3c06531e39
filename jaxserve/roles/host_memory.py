"""The memory of this process's devices, and of this host, which simulated ones share. Called before
anything is loaded (`engine/open_model.py`, `fleet/role_runtime.py`) and where sizes are chosen
(`fleet/sizing.py`)."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path

import jax

from jaxserve.config.deployment import Deployment
from jaxserve.config.model import ModelConfig
from jaxserve.mesh import Role, memory_limit
from jaxserve.roles.capacity import memory_of, role_bytes

GROUPS = (
    ("", "memory.max", "memory.current", ""),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
"""Of control groups, version 2 and 1: folder, limit, what is used, and how entries of memory.stat
begin that count the groups inside, too."""


def available_memory(
    config: ModelConfig, deployment: Deployment, devices: Mapping[Role, Collection[jax.Device]]
) -> dict[Role, int | None]:
    """Bytes that the deployment may use of a device, by role: what it says, else what devices
    report, of simulated ones their share of the host's free memory.

    Args:
      devices: this process's, of each role that it has.
    """
    reported: dict[Role, int | None] = {}
    for role, own in devices.items():
        known = [size for device in own if (size := memory_limit(device)) is not None]
        reported[role] = min(known, default=None)
    if jax.default_backend() == "cpu" and all(size is None for size in reported.values()):
        counts = {role: len(own) for role, own in devices.items() if own}
        reported |= simulated_memory(config, deployment, counts, free_host_memory())
    return memory_of(deployment, reported)


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
