"""Memory and cores that this process may use: of its devices, the host and its control groups.

Control groups of containers and systemd units limit both; simulated devices share the host's
memory. Called before anything is loaded (`fleet/assembly.py`, `fleet/role_runtime.py`) and to
choose sizes (`fleet/sizing.py`).
"""

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import jax

from jaxserve.config.deployment import Deployment
from jaxserve.config.model import ModelConfig
from jaxserve.config.topology import Role
from jaxserve.errors import ConfigError, MemoryTakenError
from jaxserve.mesh import memory_limit
from jaxserve.roles.capacity import Sizes, check_capacity, memory_of


def control_groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's control groups, innermost first, of version 2 and then 1.

    Groups are nested, such as a unit in its slice. A container sees its own group as the outermost
    one, whatever the kernel calls it.

    Args:
      root: the folder that contains `proc` and `sys`.
      controller: name of the controller in version 1: `memory` or `cpu`.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    split = [line.split(":", 2) for line in lines]
    own = {name: path for _, names, path in split for name in names.split(",")}
    for folder in ("", controller):
        top = root / "sys/fs/cgroup" / folder
        inner = top / own.get(folder, "/").lstrip("/")
        yield from (group for group in (inner, *inner.parents) if group.is_relative_to(top))


LIMITS = (
    (("memory.max", "memory.high"), "memory.current", ""),
    (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_"),
)
"""Files of control groups, version 2 and 1: limits, used bytes, and the prefix of those entries of
memory.stat that include nested groups."""


def check_memory(
    config: ModelConfig,
    deployment: Deployment,
    devices: Mapping[Role, Collection[jax.Device]],
    sizes: Sizes,
) -> None:
    """Refuses a deployment that does not fit on this process's devices.

    Args:
      devices, sizes: see `available_memory`.

    Raises:
      MemoryTakenError: it would fit if other processes of this host used no memory.
      ConfigError: it would not fit in any case.
    """
    try:
        available = available_memory(config, deployment, devices, sizes)
        check_capacity(config, deployment, available, sizes)
    except ConfigError as error:
        whole = available_memory(config, deployment, devices, sizes, whole_host_memory())
        try:
            check_capacity(config, deployment, whole, sizes)
        except ConfigError:
            raise error from None
        raise MemoryTakenError(
            f"{error}\n  it would fit if nothing else were in this host's memory"
        ) from None


def available_memory(
    config: ModelConfig,
    deployment: Deployment,
    devices: Mapping[Role, Collection[jax.Device]],
    sizes: Sizes,
    free: int | None = None,
) -> dict[Role, int | None]:
    """Returns the bytes that the deployment may use of a device, by role: the smaller of its own
    limit and what devices report. Simulated devices report nothing: for them it is the deployment's
    limit or, without one, their share of the host's free memory.

    Args:
      devices: devices of this process, by role.
      sizes: computes the needs of these roles.
      free: free bytes of the host; None reads them now.
    """
    reported: dict[Role, int | None] = {}
    for role, own in devices.items():
        known = [size for device in own if (size := memory_limit(device)) is not None]
        reported[role] = min(known, default=None)
    if jax.default_backend() == "cpu" and all(size is None for size in reported.values()):
        counts = {role: len(own) for role, own in devices.items() if own}
        free = free_host_memory() if free is None else free
        shares = simulated_memory(config, deployment, counts, free, sizes)
        silent = [role for role in shares if not getattr(deployment, role).memory_gb]
        reported |= {role: shares[role] for role in silent}
    return memory_of(deployment, reported)


def free_host_memory(root: Path = Path("/")) -> int | None:
    """Returns the free bytes of the host or, if fewer, of the container, systemd unit or slice.
    Cached pages of files count as free: the kernel drops them first."""
    sizes = _of_host(root, "MemAvailable:")
    for group, limit, current, prefix in _limits(root):
        try:
            used = int((group / current).read_text())
            entries = dict(map(str.split, (group / "memory.stat").read_text().splitlines()))
        except (OSError, ValueError):
            continue
        files = sum(int(entries.get(f"{prefix}{name}_file", 0)) for name in ("active", "inactive"))
        sizes.append(max(0, limit - used + files))
    return min(sizes, default=None)


def whole_host_memory(root: Path = Path("/")) -> int | None:
    """Returns the bytes that would be free if nothing was in memory."""
    sizes = _of_host(root, "MemTotal:") + [limit for _, limit, _, _ in _limits(root)]
    return min(sizes, default=None)


def _of_host(root: Path, entry: str) -> list[int]:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return [size] if size else []
    return [int(line.split()[1]) * 1024 for line in lines if line.startswith(entry)]


def _limits(root: Path) -> Iterator[tuple[Path, int, str, str]]:
    """Yields this process's control groups that have a limit: folder, limit, and the names of the
    used bytes, as in `LIMITS`."""
    for group in control_groups(root, "memory"):
        for names, current, prefix in LIMITS:
            limits = [size for name in names if (size := _size(group / name)) is not None]
            if limits:
                yield group, min(limits), current, prefix


def _size(path: Path) -> int | None:
    """Returns the number in a file; None if it is missing or says "max", no limit."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def simulated_memory(
    config: ModelConfig,
    deployment: Deployment,
    devices: Mapping[Role, int],
    free: int | None,
    sizes: Sizes,
) -> dict[Role, int | None]:
    """Returns the bytes of `free` that a simulated device of each role may have after the needs of
    the other devices. It is less than its own need if all together need more.

    Args:
      devices: number of devices of each role in this process.
      sizes: computes the needs of these roles.
    """
    if free is None:
        return dict.fromkeys(devices)
    needed = {
        part.role: part.total * devices.get(part.role, 0) for part in sizes(config, deployment)
    }
    spare = free - sum(needed.values())
    return {role: max(0, spare + needed.get(role, 0)) // count for role, count in devices.items()}
