"""Refuses a deployment whose roles do not fit into the memory of their devices.

Called before anything is loaded (`fleet/assembly.py`, `fleet/role_runtime.py`) and by `serve
--check`. The needs of a role are computed by `attention_bytes.py` or `ffn_bytes.py`, and those of
both by `pipelines.py`, from the templates of its blocks: nothing is allocated and no device is
needed, so a deployment of a thousand devices can be checked on a laptop.

The memory and cores that this process may use are those of its devices and of the host, within its
control groups: containers and systemd units limit both. Simulated devices share the host's memory.
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
from jax.sharding import AbstractMesh, NamedSharding

from jaxserve.config.deployment import Deployment
from jaxserve.config.formats import scaled, sharing
from jaxserve.config.model import ModelConfig
from jaxserve.config.topology import Role
from jaxserve.errors import ConfigError, MemoryTakenError
from jaxserve.mesh import Rules, memory_limit
from jaxserve.model.module import Template
from jaxserve.model.row_width import deployment_row_bytes
from jaxserve.roles.layout import step_multiple
from pallas_kernels.quantize import array_bytes

GB, FP32 = 10**9, 4


class RoleBytes(NamedTuple):
    """Bytes that each device of a role holds."""

    role: Role
    devices: int
    weights: int
    """Weights in the role's formats, with scales and with padding to equal shares."""
    cache: int
    """KV pages of all layers, those of prediction modules included, with scales."""
    activations: int
    """Activations of the largest step, estimated from sizes alone."""
    moving: int = 0
    """Room for one expert on its way to a slot (`expert_programs.py`)."""
    rings: int = 0
    """Pages of layers with a window, which keep only the last tokens of a sequence."""

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.weights + self.cache + self.activations + self.moving + self.rings


class StepSizes(NamedTuple):
    """Tokens and slots of a step, and the widths of its rows."""

    tokens: int
    """Tokens of a DP group in the largest step."""
    slots: int
    """Slots of a DP group in one lane."""
    lanes: int
    drafts: int
    d_model: int
    residual: int
    """Columns of a token's residual."""
    vocab: int
    packed: int
    """Bytes of a packed row of a dispatch message."""
    size: int
    """Bytes of a number in the model's dtype."""


Sizes = Callable[[ModelConfig, Deployment], tuple[RoleBytes, ...]]
"""Computes the needs of one role or of both. Raises ConfigError if the model cannot be divided over
the deployment's meshes."""


def block_bytes(blocks: Sequence[tuple[Template, int]], mesh: AbstractMesh, rules: Rules) -> int:
    """Returns the bytes of all blocks, each repeated as often as its count says, on one device."""
    return sum(
        count * shard_bytes(leaf.shape, leaf.dtype, NamedSharding(mesh, spec))
        for template, count in blocks
        for leaf, spec in zip(template.leaves, template.specs(rules), strict=True)
    )


def shard_bytes(shape: tuple[int, ...], dtype: jnp.dtype, sharding: NamedSharding) -> int:
    """Returns the bytes of an array on one device."""
    return array_bytes(sharding.shard_shape(shape), dtype)


def step_sizes(config: ModelConfig, deployment: Deployment) -> StepSizes:
    """Returns the sizes of the deployment's largest step."""
    multiple = step_multiple(deployment)
    return StepSizes(
        tokens=-(-deployment.scheduler.token_budget // multiple) * multiple,
        slots=deployment.scheduler.slots,
        lanes=deployment.lanes,
        drafts=deployment.drafts,
        d_model=config.d_model,
        residual=config.residual_width,
        vocab=config.vocab,
        packed=deployment_row_bytes(config, deployment).packed,
        size=jnp.dtype(deployment.dtype).itemsize,
    )


def memory_of(
    deployment: Deployment, reported: Mapping[Role, int | None] | None = None
) -> dict[Role, int | None]:
    """Returns the bytes that the deployment may use of a device, by role: `memory_gb`, or what the
    devices report if that is less; None if neither is known.

    Args:
      reported: bytes that JAX may use of a device, by role.
    """
    known = reported or {}

    def least(role: Role) -> int | None:
        written = round(getattr(deployment, role).memory_gb * GB)
        return min(filter(None, (written, known.get(role))), default=None)

    return {"attention": least("attention"), "ffn": least("ffn")}


def check_capacity(
    config: ModelConfig, deployment: Deployment, memory: Mapping[Role, int | None], sizes: Sizes
) -> None:
    """Refuses a deployment that does not fit on its devices; unknown memory is not checked.

    Args:
      sizes: computes the needs of the roles to check.

    Raises:
      ConfigError: with the arithmetic of every role that does not fit, and what would.
    """
    if all(size is None for size in memory.values()):
        return
    problems = []
    for part in sizes(config, deployment):
        available = memory[part.role]
        if available is not None and part.total > available:
            problems.append(_refusal(config, deployment, part, available, sizes))
    if problems:
        raise ConfigError("the deployment does not fit:\n  " + "\n  ".join(problems))


def _refusal(
    config: ModelConfig, deployment: Deployment, part: RoleBytes, available: int, sizes: Sizes
) -> str:
    names = ("weights", "KV pages", "rings", "activations", "room for moving experts")
    counted = part.weights, part.cache, part.rings, part.activations, part.moving
    parts = [f"{name} {gb_text(size)}" for name, size in zip(names, counted, strict=True) if size]
    key = f"{part.role}.memory_gb"
    said = key if available == round(getattr(deployment, part.role).memory_gb * GB) else "reported"
    advice = "; ".join(_what_fits(config, deployment, part, available, sizes))
    return (
        f"{' + '.join(parts)} = {gb_text(part.total)} GB of {gb_text(available)} GB ({said}) on "
        f"each of the {part.devices} {part.role} device{'s' if part.devices > 1 else ''} "
        f"({shape_of(deployment, part.role)}); "
        + (f"what would fit: {advice}" if advice else "no change of one key makes it fit")
    )


def _what_fits(
    config: ModelConfig, deployment: Deployment, part: RoleBytes, available: int, sizes: Sizes
) -> Iterator[str]:
    """Yields changes of a single key that would make the role fit."""

    def fits(key: str, value: int | str) -> bool:
        try:
            parts = sizes(config, changed(deployment, key, value))
        except (ConfigError, ValueError):
            return False  # the model cannot be cut like that
        return all(each.total <= available for each in parts if each.role == part.role)

    if part.cache:
        room = available - part.total + part.cache
        pages = room * deployment.cache.pages // part.cache
        if pages >= -(-deployment.scheduler.max_length // deployment.cache.page_size):
            yield f"cache.pages up to {pages} (now {deployment.cache.pages})"
    for axis in ("ep", "tp") if part.role == "ffn" else ("tp",):
        key, now = f"{part.role}.{axis}", getattr(getattr(deployment, part.role), axis)
        for factor in (2, 4, 8, 16, 32, 64):
            if fits(key, now * factor):
                yield f"{key} = {now * factor} ({part.devices * factor} devices)"
                break
    for key, value in _smaller(config, deployment, part):
        if fits(key, value):
            yield f"{key} = {value}"


def _smaller(
    config: ModelConfig, deployment: Deployment, part: RoleBytes
) -> Iterator[tuple[str, int | str]]:
    """Yields keys with smaller formats or step sizes to try."""
    for role in [part.role] if deployment.topology.has("ffn") else ["attention", "ffn"]:
        now = getattr(deployment, role).weights
        if not scaled(now) and not scaled(config.stored):
            yield f"{role}.weights", "fp8"
        if role == "ffn" and "group" not in (sharing(now), sharing(config.stored)):
            yield f"{role}.weights", "int4"
    if part.cache and not scaled(deployment.cache_format):
        yield "cache.format", "fp8"
    yield "scheduler.token_budget", deployment.scheduler.slots


def changed(deployment: Deployment, key: str, value: Any) -> Deployment:
    """Returns the deployment with another value of a dotted key."""
    section, _, name = key.rpartition(".")
    if not section:
        return msgspec.structs.replace(deployment, **{name: value})
    part = msgspec.structs.replace(getattr(deployment, section), **{name: value})
    return msgspec.structs.replace(deployment, **{section: part})


def shape_of(deployment: Deployment, role: Role) -> str:
    """A role's mesh in words."""
    if role == "attention":
        return f"attention.dp {deployment.attention.dp} x attention.tp {deployment.attention.tp}"
    shared = f" ({deployment.ffn.shared_ranks} shared)" if deployment.ffn.shared_ranks else ""
    return f"ffn.ep {deployment.ffn.ep}{shared} x ffn.tp {deployment.ffn.tp}"


def gb_text(size: int) -> str:
    """Bytes in GB, without the unit."""
    return f"{size / GB:.{2 if size >= GB else 4}f}"


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
