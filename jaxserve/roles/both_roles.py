"""Mesh, arrays and, on TPUs, memory that both roles share where their steps are one program
(`one_program.py`).

Arrays of such a program have the same shape on all of its devices. A *pool* therefore holds pages
on devices of the attention role, and matrices of experts on those of the ffn role. Keys and values
of layers that attend to all tokens have a pool each; latents have one. Layers of experts fill the
first pool, then the second one: a run of layers ends where a pool is full. All other arrays of the
program, which are smaller, have memory on the devices of both roles: pages of windows, the rotated
part of latents (`cache.rope`), scales, and weights without experts.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.config.deployment import Deployment
from jaxserve.config.model import LayerKind, ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.link.dispatch.shards import fast_shards
from jaxserve.mesh import (
    FFN_AXES,
    ROLE,
    AbstractSubmeshes,
    RoleMeshes,
    Rules,
    Submeshes,
    cached_sharding,
    placed,
    sharded_zeros,
    zeros_of,
)
from jaxserve.model.attention.kv_cache import PAGES_SPEC, page_pools
from jaxserve.model.ffn.block import FFNTemplates
from jaxserve.model.ffn.placement import Placement
from jaxserve.model.module import Template
from jaxserve.roles.attention_bytes import attention_weights
from jaxserve.roles.capacity import RoleBytes
from jaxserve.roles.compilation import PIECES, REPLICATED
from jaxserve.roles.lane_steps import all_runs
from jaxserve.roles.pipelines import OpenModel, on_one_mesh, role_bytes
from jaxserve.roles.weights import Leaves, RoleWeights, load_leaves, load_progress
from pallas_kernels.quantize import FOUR_BITS, entry_words
from pallas_kernels.quantize.words import LANES, PoolLayout, in_lines, stored_shape

PAGE_ROWS = 32
"""Rows of a page that a kernel writes at once; a page has whole ones."""


def refusal(deployment: Deployment) -> str:
    """Returns why one process cannot run the steps of both roles; empty if it can."""
    attention, ffn = deployment.attention.tp, deployment.ffn.tp
    if deployment.attention.devices != deployment.ffn.devices or deployment.ffn.instances > 1:
        return "one process has both roles, which need equally many devices and ffn.instances = 1"
    reason = f"attention.tp = {attention} and ffn.tp = {ffn}: one must be 1, or both equal"
    return "" if ffn in (1, attention) or attention == 1 else reason


def both_roles_mesh(deployment: Deployment, meshes: Submeshes) -> tuple[Mesh, tuple[str, ...]]:
    """Returns the devices of both roles as one mesh, and its axes that make up the ffn mesh, major
    first: the last one divides an expert's d_ff, the others divide the experts.

    The axes after `role` are `ep`, `ffn_tp` and attention's `tp`. Attention's `dp` is the product
    of the first two.

    Raises:
      ConfigError: the devices are not CPUs or TPUs, or the roles' meshes have no common axes.
    """
    devices = np.array([*meshes.attention.devices.flat, *meshes.ffn.devices.flat])
    attention, ffn, platform = deployment.attention, deployment.ffn, devices[0].platform
    whole = f"a {platform} device would hold the weights and pages of both roles"
    if reason := refusal(deployment) or ("" if platform in ("cpu", "tpu") else whole):
        advice = "start a process for each role (--processes 2), or take pipeline = layer"
        raise ConfigError(f"pipeline = step: {reason}; {advice}")
    sizes = 2, -1, max(1, ffn.tp // attention.tp), attention.tp
    mesh = Mesh(devices.reshape(sizes), (ROLE, "ep", "ffn_tp", "tp"))
    axes = ("ep", "tp", "ffn_tp") if ffn.tp == 1 else ("ep", "tp")
    return mesh, ("ep", "ffn_tp") if attention.tp == 1 else axes


class Halves:
    """Makes arrays of the mesh of both roles from those of the attention mesh, and takes the
    attention mesh's half of such arrays. Copies nothing.

    Each kind of array (shape and dtype) gets zeros for the ffn role's devices once. Shards are
    those of this process, which has equally many devices of both roles.

    Args:
      mesh, union: the attention mesh, and the mesh of both roles.
      rows: sharding over both roles of an array with a row a DP group.
    """

    def __init__(self, mesh: Mesh, union: Mesh, rows: NamedSharding):
        self._mesh, self._local, self._rows = mesh, len(mesh.local_devices), rows
        self._others = union.local_devices[self._local :]
        self._shards, assemble = fast_shards()
        self._assemble, self._zeros = functools.cache(assemble), functools.cache(self._empty)

    def spread(self, array: jax.Array) -> jax.Array:
        """Returns an array of both roles, whose first half is this one, a row a DP group."""
        shards, (first, *rest) = self._shards(array), array.shape
        whole = self._assemble((2 * first, *rest), array.dtype, self._rows)
        return whole([*shards, *self._zeros(shards[0].shape, array.dtype)])

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype) -> list[jax.Array]:
        return [jax.device_put(np.zeros(shape, dtype), device) for device in self._others]

    def apart(self, array: jax.Array) -> Sequence[jax.Array]:
        """Returns the ffn role's shards of an array of both roles."""
        return self._shards(array)[self._local :]

    def joined(
        self, array: jax.Array, others: Sequence[jax.Array], both: jax.ShapeDtypeStruct
    ) -> jax.Array:
        """Returns an array of both roles that is made of this one and the ffn role's shards."""
        whole = self._assemble(both.shape, both.dtype, both.sharding)
        return whole([*self._shards(array), *others])

    def with_empty(self, half: jax.Array, both: jax.ShapeDtypeStruct) -> jax.Array:
        """Returns an array of both roles that is made of zeros and the ffn role's half."""
        own = cached_sharding(self._mesh, PIECES)
        return self.joined(sharded_zeros(half.shape, half.dtype, own), self._shards(half), both)

    def taken(self, array: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Returns the attention mesh's half of an array of both roles, which lies there so."""
        (first, *rest), sharding = array.shape, cached_sharding(self._mesh, spec)
        whole = self._assemble((first // 2, *rest), array.dtype, sharding)
        return whole(self._shards(array)[: self._local])


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
    if (size := deployment.cache.page_size) % PAGE_ROWS:
        yield f"cache.page_size = {size} must be a multiple of {PAGE_ROWS}"
    if address := deployment.weights.address:
        yield f"weights.address = {address}: experts in pools cannot be sent to other workers"
    for kind in config.kinds():
        if (one := kind.attention).rows_a_token != 1:
            yield f"{type(one).__name__} attention has no row for each token"
        elif one.indexer:
            yield f"{type(one).__name__} attention with an indexer, which has pages of its own"
    for array in arrays:
        narrow = array.ndim == 3 and array.shape[-1] % LANES  # kernels do not swap experts
        if array.dtype in FOUR_BITS or narrow or not entry_words(array):
            tiles = f"whole tiles of {32 // array.dtype.itemsize} x {LANES}, of 8 or 16 bits"
            yield f"a device's {array.dtype}{stored_shape(array)[-2:]} needs {tiles}"


_ENTRIES = PartitionSpec(FFN_AXES)


class PooledWeights(RoleWeights):
    """Weights of both roles whose experts' matrices lie in pools.

    Args:
      pages: arrays of pages, the pools first, which steps replace.

    Attributes:
      halves: the ffn role's half of each pool, until it is in `pages`.
    """

    def __init__(self, pools: SharedPools, model: OpenModel, union: Mesh, pages: list[jax.Array]):
        super().__init__(model.source, union)
        self._pools, self._model, self._pages = pools, model, pages
        meshes, ffn = model.meshes, model.meshes.ffn
        self._others = Mesh(union.devices[0].reshape(ffn.devices.shape), ffn.axis_names)
        whole = jax.ShapeDtypeStruct(pools.over(ffn.size), jnp.int32)
        self._empty = placed(ffn, [whole], [_ENTRIES]) * len(pools.arrays)
        self.halves = zeros_of(self._empty)
        specs = () if model.templates.moe is None else model.templates.moe.specs(meshes.ffn_rules)
        taken = _ENTRIES, REPLICATED, *(specs[place] for place in pools.matrices)
        options: Any = {"mesh": ffn, "in_specs": taken, "out_specs": _ENTRIES, "check_vma": False}
        self._write = jax.jit(jax.shard_map(_written, **options), donate_argnums=0)
        self._stacked = jax.jit(lambda *each: jnp.stack(each))
        self._runs: list[Run] = []

    def of_slots(self, number: int) -> Leaves:
        """A bank's pool, and the leaves beside it."""
        return self._pages[self._runs[number].pool], *super().of_slots(number)

    def replace_slots(self, number: int, arrays: Sequence[jax.Array]) -> None:
        """Replaces what `of_slots` returns."""
        self._pages[self._runs[number].pool], *others = arrays
        super().replace_slots(number, others)

    def add_experts(self, run: Run, rules: Rules) -> None:
        """Loads the ffn blocks of a run with experts, and stacks the leaves that are in no pool.

        Args:
          rules: sharding rules of ffn blocks on the mesh of both roles.
        """
        beside = self._beside(self._model.templates.ffn[run.kind.ffn].leaves)
        of_slots = [number for number, leaf in enumerate(beside) if leaf.of_slots]
        self._banks.append((len(self.blocks), of_slots))
        self._runs.append(run)
        self.blocks.append(self._loaded(run, rules, {}))

    def renew(self, rules: Rules, placements: Mapping[int, Placement]) -> None:
        """Loads all experts again, which a lost step took along with the pages of their pools.

        Args:
          rules: see `add_experts`.
          placements: the expert of every slot, by layer.
        """
        self._pages.clear()  # the old pools are free before there are new ones
        self.halves += zeros_of(self._empty)
        with load_progress(self._source, len(placements)):
            for (block, _), run in zip(self._banks, self._runs, strict=True):
                self.blocks[block] = self._loaded(run, rules, placements)

    def _loaded(self, run: Run, rules: Rules, placements: Mapping[int, Placement]) -> Leaves:
        """Loads the ffn blocks of a run with experts, layer by layer. Returns the leaves that are
        in no pool, stacked on the mesh of both roles; the attention role's devices have zeros.
        `placements` has the expert of every slot, by layer; those missing are as at the start."""
        _, names, meshes, templates, _ = self._model
        template = templates.ffn[run.kind.ffn]
        firsts = np.array([*self._pools.firsts(run.first, run.stop - run.start).values()], np.int32)
        first_slots, others = template.entries["expert_slots"], []
        for layer in range(run.start, run.stop):
            slots = placements.get(layer, ())
            slots += first_slots[len(slots) :]  # those of the shared expert never change
            own = Template(template.build, {"expert_slots": slots}, template.parts)
            leaves = load_leaves(self._source, own, names.ffn[layer], meshes.ffn, meshes.ffn_rules)
            at = firsts + np.int32((layer - run.start) * self._pools.entries)
            found = (leaves[place] for place in self._pools.matrices)
            self.halves[run.pool] = self._write(self.halves[run.pool], at, *found)
            others.append(self._beside(leaves))
        specs = zip(template.specs(meshes.ffn_rules), template.specs(rules), strict=True)
        return tuple(map(self._stack, zip(*others, strict=True), self._beside(specs)))

    def _beside[T](self, leaves: Iterable[T]) -> list[T]:
        """Returns those of a block's leaves that are in no pool."""
        return [leaf for place, leaf in enumerate(leaves) if place not in self._pools.matrices]

    def _stack(self, leaves: Leaves, specs: tuple[PartitionSpec, PartitionSpec]) -> jax.Array:
        """Stacks a leaf of several layers, on the mesh of both roles; `specs` are those of a
        layer's leaf on the ffn mesh and on that mesh."""
        own, both = (PartitionSpec(None, *spec) for spec in specs)
        stack = self._stacked(*leaves)
        empty = sharded_zeros(stack.shape, stack.dtype, cached_sharding(self._others, own))
        shards, assemble = fast_shards()
        made = assemble(stack.shape, stack.dtype, cached_sharding(self._mesh, both))
        return made([*shards(empty), *shards(stack)])


def _written(pool: jax.Array, at: jax.Array, *matrices: jax.Array) -> jax.Array:
    """Writes matrices of a layer's experts to a pool; `at`: the entries before each."""
    for first, each in zip(at, matrices, strict=True):
        pool = jax.lax.dynamic_update_slice_in_dim(pool, in_lines(each), first, 0)
    return pool
