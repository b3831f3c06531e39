"""Memory that pages and experts share where steps are one program of both roles on TPUs.

Arrays of such a program have the same shape on all of its devices. A *pool* therefore holds pages
on devices of the attention role, and matrices of experts on those of the ffn role. Keys and values
of layers that attend to all tokens have a pool each; latents have one. Layers of experts fill the
first pool, then the second one: a run of layers ends where a pool is full. All other arrays of the
program, which are smaller, have memory on the devices of both roles: pages of windows, the rotated
part of latents (`cache.rope`), scales, and weights without experts.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from jaxserve.config.deployment import Deployment
from jaxserve.config.model import GQA, MFA, MLA, LayerKind, ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.mesh import AbstractSubmeshes, RoleMeshes
from jaxserve.model.attention.kv_cache import PAGES_SPEC, page_pools
from jaxserve.model.ffn.block import FFNTemplates
from jaxserve.roles.attention_bytes import attention_weights
from jaxserve.roles.capacity import RoleBytes
from jaxserve.roles.lane_steps import all_runs
from jaxserve.roles.role_bytes import on_one_mesh, role_bytes
from pallas_kernels.quantize import FOUR_BITS, entry_words
from pallas_kernels.quantize.words import LANES, PoolLayout, stored_shape

ROWS = 32
"""Rows of a page that a kernel writes at once; a page has whole ones."""


class Run(NamedTuple):
    """Equal layers, whose experts lie in one pool."""

    kind: LayerKind
    start: int
    stop: int
    pool: int = 0
    first: int = 0
    """Number of matrices of experts before the run's own in the pool."""


class SharedPools(PoolLayout):
    """Where pages and experts lie in the pools of a device.

    Attributes:
      arrays: keys, and values, of all layers on a device.
      matrices: matrices of a layer's experts on a device, by their place in the ffn block.
      runs: runs of layers, divided where a pool is full.
    """

    def __init__(self, deployment: Deployment, templates: FFNTemplates, meshes: RoleMeshes):
        config = templates.config
        own, pool = NamedSharding(meshes.attention, PAGES_SPEC), page_pools(config, deployment)[0]
        kept = [entry for entry in pool.entries if not entry.plain]
        pages = [_of(own, each, len(pool.layers)) for each in pool.arrays[: len(kept)]]
        matrices: dict[int, jax.ShapeDtypeStruct] = {}
        if (moe := templates.moe) is not None:
            leaves = zip(moe.leaves, moe.specs(meshes.ffn_rules), strict=True)
            matrices = {
                place: _of(NamedSharding(meshes.ffn, spec), leaf)
                for place, (leaf, spec) in enumerate(leaves)
                if leaf.of_slots and leaf.ndim == 3 and not leaf.name.endswith(("scales", "zeros"))
            }
        if reason := next(_refusals(config, deployment, [*pages, *matrices.values()]), ""):
            raise ConfigError(f"pipeline = step on TPUs: {reason}")
        layers = map(config.layer, range(config.all_layers))
        super().__init__(pages, matrices, sum(bool(kind.ffn.router) for kind in layers))
        self.runs = tuple(self._divided(all_runs(config)))

    def _divided(self, runs: Sequence[tuple[LayerKind, int, int]]) -> list[Run]:
        found, used = [], 0
        for kind, start, stop in runs:
            while start < stop:
                pool, before = divmod(used, self.layers)
                end = min(stop, start + self.layers - before) if kind.ffn.router else stop
                used += (end - start) * bool(kind.ffn.router)
                found.append(Run(kind, start, end, pool, before * self.of_layer))
                start = end
        return found


def one_program_bytes(config: ModelConfig, deployment: Deployment) -> tuple[RoleBytes, ...]:
    """Returns the bytes on a device of each role where steps are one program of both
    (`one_program.py`): arrays have equal shapes on all devices, and on TPUs pages share memory with
    experts. Embedding and head are on the attention role's devices alone.

    Raises:
      ConfigError: the model cannot be divided over the meshes, or pages and experts cannot share
        memory.
    """
    attention, ffn = role_bytes(config, deployment)
    both = on_one_mesh(attention, ffn)
    if config.platform == "tpu":
        meshes = AbstractSubmeshes(deployment)
        pools = SharedPools(deployment, FFNTemplates(config, deployment, meshes), meshes)
        both = both._replace(
            weights=both.weights - pools.matrices_bytes,
            cache=both.cache - pools.arrays_bytes + pools.bytes,
        )
    layers = attention_weights(config, deployment, ends=False) - attention.weights + both.weights
    return both, both._replace(role=ffn.role, devices=ffn.devices, weights=layers)


def _of(sharding: NamedSharding, array: Any, layers: int = 1) -> jax.ShapeDtypeStruct:
    """Returns a device's part of the array of this number of layers."""
    first, *rest = sharding.shard_shape(array.shape)
    return jax.ShapeDtypeStruct((layers * first, *rest), array.dtype)


def _refusals(config: ModelConfig, deployment: Deployment, arrays: Any) -> Iterator[str]:
    """Yields the reasons why pages and experts cannot share memory."""
    if (size := deployment.cache.page_size) % ROWS:
        yield f"cache.page_size = {size} must be a multiple of {ROWS}"
    if address := deployment.weights.address:
        yield f"weights.address = {address}: experts in pools cannot be sent to other workers"
    for kind in config.kinds():
        if not isinstance(one := kind.attention, GQA | MFA | MLA):
            yield f"{type(one).__name__} attention has no row for each token"
        elif getattr(one, "indexer", None):
            yield f"{type(one).__name__} attention with an indexer, which has pages of its own"
    for array in arrays:
        narrow = array.ndim == 3 and array.shape[-1] % LANES  # kernels do not swap experts
        if array.dtype in FOUR_BITS or narrow or not entry_words(array):
            tiles = f"whole tiles of {32 // array.dtype.itemsize} x {LANES}, of 8 or 16 bits"
            yield f"a device's {array.dtype}{stored_shape(array)[-2:]} needs {tiles}"
