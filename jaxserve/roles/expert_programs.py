"""The programs that move experts between slots and read their counts.

A *bank* is the experts of one layer (ffn role) or of a run of stacked layers (colocated). Which
expert goes where is data, so one program a bank does for every move.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int32, UInt32

from jaxserve.mesh import Rules
from jaxserve.model.ffn.exchange import ragged_all_to_all
from jaxserve.model.ffn.placement import SlotSizes
from jaxserve.model.module import Template
from jaxserve.model.quant import as_bits
from jaxserve.roles.program import REPLICATED, Program

NOTHING = -1
"""In place of a slot: nothing is copied."""


class BankShape(NamedTuple):
    """A bank's arrays beside the weights."""

    layers: int
    sizes: SlotSizes

    @property
    def table(self) -> jax.ShapeDtypeStruct:
        """`placement.replica_table` of each layer; everywhere."""
        shape = self.layers, self.sizes.experts, 1 + self.sizes.width
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    @property
    def counts(self) -> jax.ShapeDtypeStruct:
        """[layers, ranks, experts] tokens so far, modulo 2^32; each rank has its own."""
        shape = self.layers, self.sizes.ranks, self.sizes.experts
        return jax.ShapeDtypeStruct(shape, jnp.uint32)

    def counts_spec(self, axis: str) -> PartitionSpec:
        """How they are divided."""
        return PartitionSpec(None, axis)


class ExpertPrograms:
    """What moves and counts the experts of a mesh.

    Args:
      template: of a MoE layer's block.
      rules: of the mesh.
      axis: that the slots are divided over.
      stacked: whether leaves have a first axis of layers.
    """

    def __init__(
        self,
        template: Template,
        sizes: SlotSizes,
        mesh: Mesh,
        rules: Rules,
        axis: str,
        *,
        stacked: bool,
    ):
        self.template, self.sizes, self.mesh, self.axis = template, sizes, mesh, axis
        self._rules, self._stacked = rules, stacked
        self.places = tuple(
            place for place, names in enumerate(template.dimensions) if names[0] == "slots"
        )
        """Of the leaves that slots have entries of."""

    def move(self, layers: int) -> Program:
        """(moves, layer, leaves…) → (leaves…), of a bank of so many layers.

        `moves` is int32 [ranks, 2]: the slot that a rank gets an expert from, or `NOTHING`, and
        which of its own slots gets it. An expert goes straight from its device to the one that
        shall have it; beside the bank there is room for one expert a device, and on CPUs, which
        have no ragged all-to-all, one for each rank.
        """

        def body(moves: Array, layer: Array, *leaves: Array) -> tuple[Array, ...]:
            ranks, local = self.sizes.ranks, self.sizes.local
            rank = jax.lax.axis_index(self.axis)
            source = jnp.maximum(moves[:, 0], 0)
            sends = (moves[:, 0] >= 0) & (source // local == rank)
            gets = (moves[rank, 0] >= 0) & (source[rank] // local == jnp.arange(ranks))
            target = layer * local + moves[rank, 1]

            def moved(leaf: Array) -> Array:
                slots = as_bits(leaf).reshape(-1, *leaf.shape[1 + self._stacked :])
                mine = jax.lax.dynamic_slice_in_dim(slots, target, 1)
                got = ragged_all_to_all(
                    slots,
                    mine,
                    (layer * local + jnp.where(sends, source % local, 0)).astype(jnp.int32),
                    sends.astype(jnp.int32),
                    jnp.zeros(ranks, jnp.int32),
                    gets.astype(jnp.int32),
                    axes=(self.axis,),
                    rows=1,
                )
                return _same(jax.lax.dynamic_update_slice_in_dim(slots, got, target, 0), leaf)

            return tuple(map(moved, leaves))

        shapes, specs = self._leaves(layers)
        moves = jax.ShapeDtypeStruct((self.sizes.ranks, 2), jnp.int32)
        return Program(
            "move_experts",
            body,
            self.mesh,
            (moves, jax.ShapeDtypeStruct((), jnp.int32), *shapes),
            (REPLICATED, REPLICATED, *specs),
            specs,
            donated=tuple(range(2, 2 + len(shapes))),
        )

    def count(self, banks: Sequence[BankShape]) -> Program:
        """(counts of each bank…) → [layers, ranks, experts] of all of them, a copy."""

        def body(*counts: Array) -> Array:
            return jnp.concatenate(counts)

        spec = PartitionSpec(None, self.axis)
        return Program(
            "count_experts",
            body,
            self.mesh,
            tuple(bank.counts for bank in banks),
            (spec,) * len(banks),
            spec,
            donated=(),
        )

    def _leaves(
        self, layers: int
    ) -> tuple[tuple[jax.ShapeDtypeStruct, ...], tuple[PartitionSpec, ...]]:
        """Of a bank, those of its slots."""
        specs = self.template.specs(self._rules)
        leaves = [(self.template.leaves[place], specs[place]) for place in self.places]
        if not self._stacked:
            return tuple(leaf for leaf, _ in leaves), tuple(spec for _, spec in leaves)
        shapes = (jax.ShapeDtypeStruct((layers, *leaf.shape), leaf.dtype) for leaf, _ in leaves)
        return tuple(shapes), tuple(PartitionSpec(None, *spec) for _, spec in leaves)


def add_load(
    counts: UInt32[Array, "layers 1 experts"], load: Int32[Array, "layers experts"]
) -> UInt32[Array, "layers 1 experts"]:
    """A device's counts with what its experts just got."""
    return counts + load[:, None].astype(counts.dtype)


def _same(bits: Array, leaf: Array) -> Array:
    """In the shape and dtype of the leaf."""
    return jax.lax.bitcast_convert_type(bits, leaf.dtype).reshape(leaf.shape)
