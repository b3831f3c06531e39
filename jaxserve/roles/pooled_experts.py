"""Weights of which experts lie in the pools that they share with pages (`shared_pools.py`)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxserve.link.dispatch.shards import fast_shards
from jaxserve.mesh import FFN_AXES, Rules, cached_sharding, placed, sharded_zeros, zeros_of
from jaxserve.model.ffn.placement import Placement
from jaxserve.model.module import Template
from jaxserve.roles.pipelines import OpenModel
from jaxserve.roles.program import REPLICATED
from jaxserve.roles.shared_pools import Run, SharedPools
from jaxserve.roles.weights import Leaves, RoleWeights, load_leaves, load_progress
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

        Args:
          placements: the expert of every slot, by layer; those missing are as at the start.
        """
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
        """Stacks a leaf of several layers, on the mesh of both roles.

        Args:
          specs: of a layer's leaf, on the ffn mesh and on the mesh of both roles.
        """
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
