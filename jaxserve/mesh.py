"""Submeshes from a deployment, and the one table that says how every dimension is sharded.

Called by `model/` and the layers above. It knows the names of dimensions and mesh axes, not the
arrays that have them.
"""

import ctypes
import functools
import itertools
import mmap
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxserve.config.deployment import Deployment, check_slice, runtime_roles
from jaxserve.errors import ConfigError

Axes = str | tuple[str, ...] | None
Rules = Mapping[str, Axes]
AnyMesh = Mesh | AbstractMesh
"""A mesh of devices, or one for shapes alone."""

ATTENTION_AXES = ("dp", "tp")
FFN_AXES = ("ep", "tp")
ROLE = "role"
"""First axis of a mesh with the devices of both roles: 0 for attention, 1 for ffn."""
INSTANCE = "instance"
"""First axis of an ffn mesh with several instances (`ffn.instances`)."""

ATTENTION_RULES: Rules = {
    "groups": "dp",
    "pages": "dp",
    "tokens": "dp",
    "q_heads": "tp",
    "kv_heads": "tp",
    "out_heads": ("tp", "dp"),
    "vocab": "tp",
    "embedding": "tp",
}
"""Rules of the attention mesh. Low-rank queries and latents are replicated over tp. So are the
weights of K and V heads if the model has fewer heads than devices (`kv_heads_everywhere`). The
output projection's columns are `out_heads` where all devices divide it, else `q_heads`."""

FFN_RULES: dict[str, Axes] = {
    "expert_slots": "ep",
    "expert_d_ff": "tp",
    "d_ff": ("ep", "tp"),
    "shared_d_ff": "tp",
}
"""Rules of the ffn mesh. Slots of routed experts are divided over ep, every expert's d_ff over tp,
and dense FFNs over all devices. The shared expert is divided over all devices, too (`d_ff`),
unless every ep rank runs it for its own rows (`shared_d_ff`, with `ffn.exchange` = alltoall), every
device has the whole expert (`own_d_ff`, with `ffn.shared: whole`), or ranks of its own hold it in
slots (`ffn.shared: ranks:n`)."""

INSTANCE_RULES = FFN_RULES | {
    "expert_slots": (INSTANCE, "ep"),
    "d_ff": (INSTANCE, "ep", "tp"),
    "shared_d_ff": (INSTANCE, "tp"),
    "own_d_ff": INSTANCE,
}
"""Rules of an ffn mesh with several instances, each of which gets all rows. Instances divide the
part of the shared expert that every rank or device would otherwise run for its own rows."""

COLOCATED_FFN_RULES = FFN_RULES | {"expert_slots": "dp", "d_ff": ("dp", "tp"), "own_d_ff": "tp"}
"""The ffn role's rules on the one mesh of colocated mode: `dp` is the expert-parallel axis too."""


def expert_axes(mesh: AnyMesh) -> tuple[str, ...]:
    """Axes of an ffn mesh that experts are divided over: all but the last, which divides d_ff, and
    `ROLE`."""
    return tuple(name for name in mesh.shape if name != ROLE)[:-1]


def ffn_rules(mesh: AnyMesh) -> Rules:
    """Sharding rules of an ffn mesh."""
    return INSTANCE_RULES if INSTANCE in mesh.shape else FFN_RULES


class Submeshes:
    """The meshes of a deployment.

    Attributes:
      domains: the attention meshes, each with axes ("dp", "tp"). On several processes, every
        process has an equal part of each mesh.
      attention: the first attention mesh; all have the same shape.
      ffn: mesh with axes ("ep", "tp"), preceded by `INSTANCE` if the role has several instances.
        In colocated mode it is the attention mesh.
      ffn_rules: sharding rules of the ffn mesh.
    """

    def __init__(self, deployment: Deployment, devices: Sequence[jax.Device] | None = None):
        devices = by_process(jax.devices() if devices is None else devices)
        need = deployment.devices
        if len(devices) < need:
            role_a, role_f = deployment.attention, deployment.ffn
            parts = f"attention.dp {role_a.dp} x attention.tp {role_a.tp}"
            if deployment.runtime_domains > 1:
                parts = f"domains {deployment.domains} x ({parts})"
            if deployment.topology.has("ffn"):
                parts += f" + ffn.ep {role_f.ep} x ffn.tp {role_f.tp}"
            raise ConfigError(f"layout {parts} = {need} devices, but there are {len(devices)}")
        if devices[0].platform == "tpu" and not deployment.topology.crosses_runtimes:
            check_slice(len(devices), runtime_roles(deployment)[0])
        domains, ffn = role_groups(deployment, devices)
        self.domains = tuple(Mesh(np.array(rows), ATTENTION_AXES) for rows in domains)
        self.attention = self.domains[0]
        shapes = AbstractSubmeshes(deployment)
        self.ffn, self.ffn_rules = self.attention, shapes.ffn_rules
        if ffn:
            self.ffn = Mesh(np.array(ffn).reshape(shapes.ffn.axis_sizes), shapes.ffn.axis_names)


def role_groups[D](
    deployment: Deployment, devices: Sequence[D]
) -> tuple[list[list[list[D]]], list[list[D]]]:
    """Divides devices into the rows of each domain's mesh and of the ffn mesh.

    Attention gets the first devices and ffn the next ones: of all devices, or of each process if
    processes have both roles. In colocated mode the ffn mesh has no rows.

    Raises:
      ConfigError: the data centre's network would join the devices of a row.
    """
    a, f = deployment.attention, deployment.ffn
    split = deployment.runtime_domains * a.devices
    by_host = [list(own) for _, own in itertools.groupby(devices, _process_of)]
    if deployment.shares_processes(len(by_host)):
        own, more = split // len(by_host), f.devices // len(by_host)
        first = [device for host in by_host for device in host[:own]]
        devices = first + [device for host in by_host for device in host[own : own + more]]
    domains = [
        mesh_rows(part, a.dp, a.tp, "attention")
        for part in _domain_devices(devices[:split], deployment.runtime_domains)
    ]
    if deployment.topology.has("colocated"):
        return domains, []
    return domains, mesh_rows(devices[split : split + f.devices], f.ep, f.tp, "ffn")


def by_process[D](devices: Sequence[D]) -> list[D]:
    """Sorts devices by slice and process; devices of one process keep their order.

    Roles are divided over processes in this order, and device ids need not follow it: on a TPU
    slice they may follow the chips' coordinates, which interleave hosts. Processes of a slice come
    one after the other, so a role has whole slices where that is possible.
    """
    return sorted(devices, key=lambda device: (slice_of(device), _process_of(device)))


_process_of = operator.attrgetter("process_index")


def slice_of(device: Any) -> int:
    """Number of a device's TPU slice; 0 for a single slice and for other devices. JAX has an
    attribute of the same name on GPUs, with another meaning."""
    kind = str(getattr(device, "device_kind", ""))
    return (getattr(device, "slice_index", None) or 0) if kind.startswith("TPU") else 0


def ring[D](devices: Sequence[D]) -> list[D]:
    """Orders devices of a TPU slice so that neighbours, and the two ends, are one hop apart.

    Such a ring exists if the chips form a box with an even side and more than one row. In any other
    box only the two ends are further apart. Devices that form no box or have no coordinates keep
    their order. The cores of a chip stay together.
    """
    places = [getattr(device, "coords", None) for device in devices]
    if any(place is None for place in places):
        return list(devices)
    chips: dict[tuple[int, ...], list[D]] = {}
    for place, device in zip(places, devices, strict=True):
        chips.setdefault(tuple(place or ()), []).append(device)
    sides = [sorted(set(side)) for side in zip(*chips, strict=True)]
    long = [len(side) for side in sides]
    connected = all(side[-1] - side[0] == len(side) - 1 for side in sides)
    if not connected or np.prod(long) != len(chips):
        return list(devices)
    *others, last = sorted(range(len(sides)), key=lambda axis: long[axis])
    path: list[dict[int, int]] = [{}]
    for axis in others:  # to and fro: each step is one hop
        path = [
            before | {axis: place}
            for turn, before in enumerate(path)
            for place in sides[axis][:: -1 if turn % 2 else 1]
        ]
    plane = _cycle(len(path), long[last])
    order = (path[row] | {last: sides[last][column]} for row, column in plane)
    return [device for at in order for device in chips[tuple(at[axis] for axis in sorted(at))]]


def _cycle(rows: int, columns: int) -> list[tuple[int, int]]:
    """All places of a grid in an order in which neighbours touch. The two ends touch as well if a
    side is even and both sides are longer than one."""
    if rows % 2 and columns % 2 == 0 and rows > 1:
        return [(row, column) for column, row in _cycle(columns, rows)]
    if rows % 2 or columns == 1:
        first, back = 0, []
    else:
        first, back = 1, [(row, 0) for row in reversed(range(1, rows))]
    across = range(first, columns)
    there = [(row, column) for row in range(rows) for column in across[:: -1 if row % 2 else 1]]
    return [(0, 0), *there, *back] if first else there


def _domain_devices[D](devices: Sequence[D], domains: int) -> list[list[D]]:
    """Attention devices of each domain: if possible an equal part of every process, because the
    leader, process 0, reads the tokens of all domains."""
    by_host = [list(own) for _, own in itertools.groupby(devices, _process_of)]
    if any(len(own) % domains for own in by_host):
        by_host = [list(devices)]
    parts: list[list[D]] = [[] for _ in range(domains)]
    for own in by_host:
        share = len(own) // domains
        for domain, part in enumerate(parts):
            part += own[domain * share : (domain + 1) * share]
    return parts


class AbstractSubmeshes:
    """The meshes of a deployment without devices, for shapes and shardings.

    Attributes: see `Submeshes`.
    """

    def __init__(self, deployment: Deployment):
        a = deployment.attention
        self.attention = AbstractMesh((a.dp, a.tp), ATTENTION_AXES)
        self.ffn = self.attention
        self.ffn_rules: Rules = COLOCATED_FFN_RULES
        if deployment.topology.has("ffn"):
            f = deployment.ffn
            outer = {INSTANCE: f.instances} if f.instances > 1 else {}
            sizes = outer | dict(zip(FFN_AXES, (f.ep // f.instances, f.tp), strict=True))
            self.ffn = AbstractMesh(tuple(sizes.values()), tuple(sizes))
            self.ffn_rules = ffn_rules(self.ffn)


class GivenMeshes(NamedTuple):
    """Meshes that were made elsewhere; see `Submeshes`."""

    attention: AnyMesh
    ffn: Mesh
    ffn_rules: Rules


RoleMeshes = Submeshes | AbstractSubmeshes | GivenMeshes
"""The meshes and rules that templates read."""


def mesh_rows[D](devices: Sequence[D], rows: int, columns: int, role: str) -> list[list[D]]:
    """Cuts devices into rows of `columns`. Each row divides matrices and is a ring of neighbours.

    Raises:
      ConfigError: the data centre's network would join the devices of a group.
    """
    groups = [list(devices[row * columns : (row + 1) * columns]) for row in range(rows)]
    for number, group in enumerate(groups):
        slices = sorted({slice_of(device) for device in group})
        if len(slices) > 1:
            raise ConfigError(
                f"{role}.tp = {columns}: group {number} would lie on the slices "
                f"{', '.join(map(str, slices))}; sizes of roles have to divide a slice's devices"
            )
    return [ring(group) for group in groups]


def partition_spec(dimensions: Sequence[str | None], rules: Rules) -> PartitionSpec:
    """Returns the partition spec of an array with these dimensions; a dimension without a rule is
    replicated.

    Raises:
      ValueError: two dimensions of one array would use the same mesh axis.
    """
    entries = [rules.get(name) if name else None for name in dimensions]
    used = [axis for entry in entries for axis in _names(entry)]
    if len(used) != len(set(used)):
        raise ValueError(f"dimensions {tuple(dimensions)} use a mesh axis twice: {used}")
    return PartitionSpec(*entries)


@functools.lru_cache(maxsize=4096)
def cached_sharding(mesh: AnyMesh, spec: PartitionSpec) -> NamedSharding:
    """Returns the same `NamedSharding` object for a (mesh, spec) every time: a new one in every
    step would miss JAX's fast dispatch path."""
    return NamedSharding(mesh, spec)


def placed(
    mesh: AnyMesh, arrays: Iterable[jax.ShapeDtypeStruct], specs: Iterable[PartitionSpec]
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Adds the sharding on the mesh to each shape and dtype."""
    return tuple(
        jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=cached_sharding(mesh, spec))
        for array, spec in zip(arrays, specs, strict=True)
    )


def zeros_of(arrays: Iterable[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """Makes zeroed arrays of these shapes and shardings."""
    return [sharded_zeros(array.shape, array.dtype, array.sharding) for array in arrays]


def sharded_zeros(shape: tuple[int, ...], dtype: jnp.dtype, sharding: NamedSharding) -> jax.Array:
    """Makes a zeroed array on its devices. Of a host's memory it takes a page once it is written:
    memory that is given back to the system reads as zeros."""
    zeros: jax.Array = _zeros_maker(shape, dtype, sharding)()
    if sharding.mesh.devices.flat[0].platform == "cpu" and hasattr(mmap, "MADV_DONTNEED"):
        for shard in jax.block_until_ready(zeros).addressable_shards:
            begin, page = shard.data.unsafe_buffer_pointer(), mmap.PAGESIZE
            end = begin + shard.data.on_device_size_in_bytes()  # nbytes: twice that of 4-bit types
            start, stop = -(-begin // page) * page, end // page * page
            where = ctypes.c_void_p(start), ctypes.c_size_t(max(0, stop - start))
            ctypes.CDLL(None).madvise(*where, mmap.MADV_DONTNEED)
    return zeros


@functools.lru_cache(maxsize=64)
def _zeros_maker(shape: tuple[int, ...], dtype: jnp.dtype, sharding: NamedSharding) -> Any:
    """Compiles a function that makes zeros; cached, so that layers share it."""
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)


def axis_product(mesh: Mesh | AbstractMesh, axes: Axes) -> int:
    """Number of shards that `axes` cut a dimension into."""
    return int(np.prod([mesh.shape[name] for name in _names(axes)], dtype=int))


def _names(axes: Axes) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else axes or ()


def shards(mesh: Mesh | AbstractMesh, rules: Rules) -> dict[str, int]:
    """The number of shards of each dimension that has a rule, by its name."""
    return {name: axis_product(mesh, axes) for name, axes in rules.items()}


def memory_limit(device: jax.Device) -> int | None:
    """Bytes that JAX may use of a device; None if the device does not report them (CPU)."""
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except jax.errors.JaxRuntimeError:  # not implemented on this platform
        return None
