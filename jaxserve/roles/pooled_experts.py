"""Weights of which experts lie in the pools that they share with pages (`shared_pools.py`)."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxserve.link.dispatch.shards import fast_shards
from jaxserve.mesh import FFN_AXES, Rules, cached_sharding, sharded_zeros
from jaxserve.roles.pipelines import OpenModel
from jaxserve.roles.program import REPLICATED
from jaxserve.roles.shared_pools import Run, SharedPools
from jaxserve.roles.weights import Leaves, RoleWeights, load_leaves
from pallas_kernels.quantize.words import in_lines

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
        kind = pools.over(ffn.size), jnp.dtype(jnp.int32), cached_sharding(ffn, _ENTRIES)
        self.halves = [sharded_zeros(*kind) for _ in pools.arrays]
        specs = () if model.templates.moe is None else model.templates.moe.specs(meshes.ffn_rules)
        taken = _ENTRIES, REPLICATED, *(specs[place] for place in pools.matrices)
        options: Any = {"mesh": ffn, "in_specs": taken, "out_specs": _ENTRIES, "check_vma": False}
        self._write = jax.jit(jax.shard_map(_written, **options), donate_argnums=0)
        self._pool_of: list[int] = []

    def of_slots(self, number: int) -> Leaves:
        """A bank's pool, and the leaves beside it."""
        return self._pages[self._pool_of[number]], *super().of_slots(number)

    def replace_slots(self, number: int, arrays: Sequence[jax.Array]) -> None:
        """Replaces what `of_slots` returns."""
        self._pages[self._pool_of[number]], *others = arrays
        super().replace_slots(number, others)

    def add_experts(self, run: Run, rules: Rules) -> None:
        """Loads the ffn blocks of a run with experts, layer by layer. The leaves that are in no
        pool are stacked, on the mesh of both roles; the attention role's devices have zeros.

        Args:
          rules: sharding rules of ffn blocks on the mesh of both roles.
        """
        _, names, meshes, templates, source = self._model
        template, matrices = templates.ffn[run.kind.ffn], self._pools.matrices
        beside = [place for place in range(len(template.leaves)) if place not in matrices]
        firsts = np.array([*self._pools.firsts(run.first, run.stop - run.start).values()], np.int32)
        others: list[Sequence[jax.Array]] = []
        for layer in range(run.start, run.stop):
            leaves = load_leaves(source, template, names.ffn[layer], meshes.ffn, meshes.ffn_rules)
            at = firsts + np.int32((layer - run.start) * self._pools.entries)
            found = (leaves[place] for place in matrices)
            self.halves[run.pool] = self._write(self.halves[run.pool], at, *found)
            others.append([leaves[place] for place in beside])
        own, both = template.specs(meshes.ffn_rules), template.specs(rules)
        specs = ((own[place], both[place]) for place in beside)
        of_slots = [n for n, place in enumerate(beside) if template.leaves[place].of_slots]
        self._banks.append((len(self.blocks), of_slots))
        self._pool_of.append(run.pool)
        self.blocks.append(tuple(map(self._stack, zip(*others, strict=True), specs)))

    def _stack(self, leaves: Leaves, specs: tuple[PartitionSpec, PartitionSpec]) -> jax.Array:
        """Stacks a leaf of several layers, on the mesh of both roles.

        Args:
          specs: of a layer's leaf, on the ffn mesh and on the mesh of both roles.
        """
        own, both = (PartitionSpec(None, *spec) for spec in specs)
        stack = jax.jit(lambda *each: jnp.stack(each))(*leaves)
        empty = sharded_zeros(stack.shape, stack.dtype, cached_sharding(self._others, own))
        shards, assemble = fast_shards()
        made = assemble(stack.shape, stack.dtype, cached_sharding(self._mesh, both))
        return made([*shards(empty), *shards(stack)])


def _written(pool: jax.Array, at: jax.Array, *matrices: jax.Array) -> jax.Array:
    """Writes matrices of a layer's experts to a pool; `at`: the entries before each."""
    for first, each in zip(at, matrices, strict=True):
        pool = jax.lax.dynamic_update_slice_in_dim(pool, in_lines(each), first, 0)
    return pool
