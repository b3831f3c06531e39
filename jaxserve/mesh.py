"""Submeshes from a deployment, and the one table that says how every dimension is sharded.

Called by `model.py` and the layers above. It knows the names of dimensions and mesh axes, and
nothing of the arrays that have them.
"""

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxserve.config.deployment import Deployment
from jaxserve.errors import ConfigError

Axes = str | tuple[str, ...] | None
Rules = Mapping[str, Axes]

ATTENTION_AXES = ("dp", "tp")
FFN_AXES = ("ep", "tp")

ATTENTION_RULES: Rules = {
    "groups": "dp",
    "pages": "dp",
    "tokens": "dp",
    "q_heads": "tp",
    "kv_heads": "tp",
    "vocab": "tp",
    "embedding": "tp",
}
"""Attention mesh. Low-rank queries and latents are replicated over tp, as are the weights of K and
V heads where there are fewer of them than devices (`kv_heads_everywhere`)."""

FFN_RULES: Rules = {"experts": "ep", "expert_d_ff": "tp", "d_ff": ("ep", "tp")}
"""ffn mesh. Routed experts over ep, every expert's d_ff over tp; dense FFN and shared expert over
all devices."""

COLOCATED_FFN_RULES: Rules = {"experts": "dp", "expert_d_ff": "tp", "d_ff": ("dp", "tp")}
"""The same on the one mesh of colocated mode: DP groups double as the expert-parallel axis."""


class Submeshes:
    """The meshes of a deployment.

    Attributes:
      attention: Mesh with axes ("dp", "tp").
      ffn: Mesh with axes ("ep", "tp"); in colocated mode the attention mesh itself.
      ffn_axes: the axes of `ffn` over which experts and d_ff are split, major first.
    """

    def __init__(self, deployment: Deployment, devices: Sequence[jax.Device] | None = None):
        devices = list(jax.devices() if devices is None else devices)
        need = deployment.devices
        if len(devices) < need:
            role_a, role_f = deployment.attention, deployment.ffn
            parts = f"attention.dp {role_a.dp} x attention.tp {role_a.tp}"
            if deployment.mode == "afd":
                parts += f" + ffn.ep {role_f.ep} x ffn.tp {role_f.tp}"
            raise ConfigError(f"layout {parts} = {need} devices, but there are {len(devices)}")
        a = deployment.attention
        self.attention = Mesh(_grid(devices[: a.devices], a.dp, a.tp), ATTENTION_AXES)
        if deployment.mode == "colocated":
            self.ffn, self.ffn_axes, self.ffn_rules = (
                self.attention,
                ATTENTION_AXES,
                COLOCATED_FFN_RULES,
            )
        else:
            f = deployment.ffn
            self.ffn = Mesh(_grid(devices[a.devices : need], f.ep, f.tp), FFN_AXES)
            self.ffn_axes, self.ffn_rules = FFN_AXES, FFN_RULES


class AbstractSubmeshes:
    """The meshes of a deployment without devices: for shapes and shardings of any number of them.

    Attributes: as those of `Submeshes`.
    """

    def __init__(self, deployment: Deployment):
        a, f = deployment.attention, deployment.ffn
        self.attention = AbstractMesh((a.dp, a.tp), ATTENTION_AXES)
        if deployment.mode == "colocated":
            self.ffn, self.ffn_axes, self.ffn_rules = (
                self.attention,
                ATTENTION_AXES,
                COLOCATED_FFN_RULES,
            )
        else:
            self.ffn = AbstractMesh((f.ep, f.tp), FFN_AXES)
            self.ffn_axes, self.ffn_rules = FFN_AXES, FFN_RULES


def _grid(devices: Sequence[jax.Device], rows: int, columns: int) -> np.ndarray:
    return np.array(devices).reshape(rows, columns)


def has_local_devices(mesh: Mesh) -> bool:
    """Whether this process owns a device of the mesh (and so compiles and runs its programs)."""
    return any(device.process_index == jax.process_index() for device in mesh.devices.flat)


def partition_spec(dimensions: Sequence[str | None], rules: Rules) -> PartitionSpec:
    """The spec of an array with these dimensions; a dimension without a rule is replicated.

    Raises:
      ValueError: two dimensions of one array would use the same mesh axis.
    """
    entries = [rules.get(name) if name else None for name in dimensions]
    used = [
        axis for entry in entries for axis in ((entry,) if isinstance(entry, str) else entry or ())
    ]
    if len(used) != len(set(used)):
        raise ValueError(f"dimensions {tuple(dimensions)} use a mesh axis twice: {used}")
    return PartitionSpec(*entries)


@functools.lru_cache(maxsize=4096)
def cached_sharding(mesh: Mesh, spec: PartitionSpec) -> NamedSharding:
    """One object a (mesh, spec): a fresh sharding each step would leave JAX's fast path."""
    return NamedSharding(mesh, spec)


def sharded_zeros(shape: tuple[int, ...], dtype: jnp.dtype, sharding: NamedSharding) -> jax.Array:
    """A zeroed array, made on its devices."""
    return _zeros_maker(shape, dtype, sharding)()


@functools.lru_cache(maxsize=64)
def _zeros_maker(
    shape: tuple[int, ...], dtype: jnp.dtype, sharding: NamedSharding
) -> jax.stages.Wrapped:
    """Compiled once for all layers."""
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)


def axis_product(mesh: Mesh | AbstractMesh, axes: Axes) -> int:
    """Number of shards that `axes` cut a dimension into."""
    names = (axes,) if isinstance(axes, str) else axes or ()
    return int(np.prod([mesh.shape[name] for name in names], dtype=int))


def shards(mesh: Mesh | AbstractMesh, rules: Rules) -> dict[str, int]:
    """Into how many parts the mesh cuts each dimension that has a rule."""
    return {name: axis_product(mesh, axes) for name, axes in rules.items()}
