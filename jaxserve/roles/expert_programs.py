"""Programs that move experts between slots and read their token counts.

Every device has room for one expert beside its slots. A moving expert arrives there piece by piece,
while steps run, and is copied to its slot when the table changes (xDeepServe §4.5, step 3).

A *bank* is the experts of one layer (ffn role) or of a run of stacked layers (colocated). Source
and target of a move are arguments, so one program for each bank makes every move.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int32, UInt32

from jaxserve.config.sections import Experts
from jaxserve.mesh import ROLE, AnyMesh, Rules, placed
from jaxserve.model.ffn.block import FFNTemplates
from jaxserve.model.ffn.collectives import exchanged_rows, spare_rows
from jaxserve.model.ffn.placement import SlotSizes
from jaxserve.model.module import Template, TemplateLeaf
from jaxserve.roles.compilation import REPLICATED, Program
from pallas_kernels.quantize import array_bytes, from_bytes, in_bytes
from pallas_kernels.quantize.words import PoolLayout, Words, in_lines

NOTHING = -1
"""Stands for a slot where nothing is copied."""


class Bank(NamedTuple):
    """The experts of one layer, or of a run of layers whose leaves are stacked."""

    layers: Sequence[int]
    sizes: SlotSizes
    pool: int = 0
    first: int = 0
    """Pool that has the bank's matrices, and the number of matrices before them in it, where pages
    and experts share memory (`both_roles.py`)."""

    @property
    def form(self) -> tuple[int, int]:
        """Number of layers, and `first`: banks that share them share programs."""
        return len(self.layers), self.first

    @property
    def table(self) -> jax.ShapeDtypeStruct:
        """Shape of the layers' `placement.replica_table`s, which every device holds whole."""
        shape = len(self.layers), self.sizes.experts, 1 + self.sizes.width
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    @property
    def counts(self) -> jax.ShapeDtypeStruct:
        """Shape of each rank's token counts, modulo 2^32: [layers, ranks, experts]."""
        shape = len(self.layers), self.sizes.all_ranks, self.sizes.experts
        return jax.ShapeDtypeStruct(shape, jnp.uint32)

    @staticmethod
    def counts_spec(axes: tuple[str, ...]) -> PartitionSpec:
        """Returns how counts are divided."""
        return PartitionSpec(None, axes)


def stacked_banks(runs: Iterable[Sequence[Any]], sizes: SlotSizes) -> tuple[Bank, ...]:
    """Returns a bank for each of these runs of equal layers (`ModelConfig.runs`) that has routed
    experts."""
    return tuple(
        Bank(tuple(range(start, stop)), sizes, *place)
        for kind, start, stop, *place in runs
        if kind.ffn.router
    )


def bank_arrays(
    mesh: AnyMesh, banks: Sequence[Bank], axes: tuple[str, ...]
) -> tuple[tuple[jax.ShapeDtypeStruct, ...], tuple[jax.ShapeDtypeStruct, ...]]:
    """Shapes of the counts and the tables of these banks, as arguments of programs.

    Args:
      axes: mesh axes that the slots are divided over.
    """
    counts = placed(mesh, [bank.counts for bank in banks], [Bank.counts_spec(axes)] * len(banks))
    return counts, placed(mesh, [bank.table for bank in banks], [REPLICATED] * len(banks))


def expert_bytes(template: Template, sizes: SlotSizes) -> int:
    """Returns the bytes of one expert's weights in one layer, summed over the devices that share
    it.

    Args:
      template: template of a MoE layer's block.
    """
    total = sum(array_bytes(leaf.shape, leaf.dtype) for leaf in template.leaves if leaf.of_slots)
    return total // sizes.all_slots


def move_pieces(templates: FFNTemplates, settings: Experts) -> int:
    """Returns the number of pieces in which an expert is fetched, so that a device gets at most
    `experts.move_mb_per_step` between two steps. Not more than its largest leaf has rows."""
    template, tensor_ranks = templates.moe, templates.ranks[1]
    assert template is not None
    leaves = [leaf for leaf in template.leaves if leaf.of_slots]
    rows = max(leaf.shape[_cut_axis(leaf)] // tensor_ranks for leaf in leaves)
    size = expert_bytes(template, templates.slots) / tensor_ranks
    return max(1, min(math.ceil(size / (settings.move_mb_per_step * 1e6)), rows))


def _cut_axis(leaf: TemplateLeaf) -> int:
    """Returns the axis along which a slot's entry is cut into pieces: its rows, or its inputs where
    tiles of rows must stay whole."""
    return 2 if leaf.input_major else 1


class ExpertPrograms:
    """Programs that move and count the experts of a mesh.

    Args:
      templates: Templates of a model with routed experts.
      settings: Source and rate of moves.
      mesh: Mesh of the experts.
      rules: Sharding rules of the mesh.
      axes: Mesh axes that the slots are divided over.
      stacked: True if leaves have a first axis of layers.
      pools: where matrices lie that share memory with pages, on a mesh of both roles.
    """

    def __init__(
        self,
        templates: FFNTemplates,
        settings: Experts,
        mesh: AnyMesh,
        rules: Rules,
        axes: tuple[str, ...],
        *,
        stacked: bool,
        pools: PoolLayout | None = None,
    ):
        assert templates.moe is not None
        self.templates, self.template = templates, (template := templates.moe)
        self.sizes, self.axes = templates.slots, axes
        self.mesh = cast(Mesh, mesh)  # an abstract mesh suffices to compute shapes
        self.rules, self.settings, self._stacked = rules, settings, stacked
        self.pieces = move_pieces(templates, settings)
        self.places = tuple(place for place, leaf in enumerate(template.leaves) if leaf.of_slots)
        """Places in the block of the leaves with one entry for each slot."""
        self._pools, self._pooled = pools, () if pools is None else tuple(pools.matrices)
        self._apart = [place for place in self.places if place not in self._pooled]

    @property
    def room(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of the room for arriving experts: the leaves of one expert for each rank."""
        ranks, leaves = self.sizes.all_ranks, [self.template.leaves[n] for n in self.places]
        shapes = [jax.ShapeDtypeStruct((ranks, *leaf.shape[1:]), leaf.dtype) for leaf in leaves]
        specs = self.template.specs(self.rules)
        return placed(self.mesh, shapes, [specs[place] for place in self.places])

    def fetch(self, bank: Bank) -> Program:
        """(moves, layer, piece, arrays of the slots…, leaves of the room…) → (leaves of the room…),
        for banks of this form.

        `moves` is int32 [ranks, 2]: the slot that a rank gets an expert from, or `NOTHING`, and the
        slot of its own that the expert is for. A piece goes straight from the device that has it to
        the one that needs it. A device with nothing to send may have to send one row
        (`exchanged_rows`).
        """

        def body(moves: Array, layer: Array, piece: Array, *arrays: Array) -> tuple[Array, ...]:
            ranks, local = self.sizes.all_ranks, self.sizes.local
            rank = jax.lax.axis_index(self.axes)
            source = jnp.maximum(moves[:, 0], 0)
            sends = (moves[:, 0] >= 0) & (source // local == rank)
            gets = (moves[rank, 0] >= 0) & (source[rank] // local == jnp.arange(ranks))

            def fetched(place: int, held: Array) -> Array:
                number, first = self._slot(bank, place, layer)
                leaf, axis = arrays[number], _cut_axis(self.template.leaves[place])
                as_held, pooled = held, place in self._pooled
                held = in_lines(held) if pooled else held
                rows = -(-held.shape[axis] // self.pieces)
                # The last piece overlaps the one before, so that all have the same size.
                start = jnp.minimum(piece * rows, held.shape[axis] - rows)
                inner, begin = [local, *held.shape[1:]], [jnp.int32(0)] * held.ndim
                inner[axis], begin[axis] = rows, start
                outer = [1] * (len(first) - 1)
                part = jax.lax.dynamic_slice(leaf, [*first, *begin[1:]], [*outer, *inner])
                part = part.reshape(inner)
                mine = jax.lax.dynamic_slice_in_dim(held, start, rows, axis=axis)
                mine = jnp.moveaxis(mine, axis, 1)
                sent = in_bytes(jnp.moveaxis(part, axis, 1))
                got = exchanged_rows(
                    sent.reshape(local * rows, -1),
                    rows + spare_rows(),
                    jnp.where(sends, source % local * rows, 0).astype(jnp.int32),
                    jnp.where(sends, rows, 0).astype(jnp.int32),
                    jnp.zeros(ranks, jnp.int32),
                    jnp.where(gets, rows, 0).astype(jnp.int32),
                    axes=self.axes,
                    rows=rows,
                )
                value = from_bytes(got[:rows].reshape(1, *sent.shape[1:]), mine)
                value = jnp.where(moves[rank, 0] >= 0, value, mine)
                value = jnp.moveaxis(value, 1, axis)
                whole = jax.lax.dynamic_update_slice_in_dim(held, value, start, axis=axis)
                return Words.in_pool(whole, as_held).array() if pooled else whole

            return tuple(map(fetched, self.places, arrays[count:]))

        (moves, layer), arrays, room = self._numbers, self._arrays(bank), self.room
        count, end = len(arrays), 3 + len(arrays)
        given, specs = (moves, layer, layer, *arrays, *room), _specs(room)
        donated = tuple(range(end, end + len(room)))
        return Program("fetch_experts", body, self.mesh, given, specs, donates=donated, ragged=True)

    def insert(self, bank: Bank) -> Program:
        """(moves, layer, leaves of the room…, arrays of the slots…) → (arrays of the slots…), for
        banks of this form. Every rank that gets an expert copies it to its slot."""

        def body(moves: Array, layer: Array, *arrays: Array) -> tuple[Array, ...]:
            source, target = moves[jax.lax.axis_index(self.axes)]
            gets, leaves = source != NOTHING, [*arrays[count:]]
            if self._pools is not None:  # devices of attention have pages there
                gets &= jax.lax.axis_index(ROLE) == 1
            for place, value in zip(self.places, arrays[:count], strict=True):
                number, (*outer, first) = self._slot(bank, place, layer)
                value = in_lines(value) if place in self._pooled else value
                start = (*outer, first + target, *(0,) * (value.ndim - 1))
                value = value.reshape(*(1 for _ in outer), *value.shape)
                mine = jax.lax.dynamic_slice(leaves[number], start, value.shape)
                value = jnp.where(gets, value, mine)
                leaves[number] = jax.lax.dynamic_update_slice(leaves[number], value, start)
            return tuple(leaves)

        count, arrays = len(self.places), self._arrays(bank)
        given, first = (*self._numbers, *self.room, *arrays), 2 + count
        slots = tuple(range(first, first + len(arrays)))
        return Program("insert_experts", body, self.mesh, given, _specs(arrays), donates=slots)

    @property
    def _numbers(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of `moves` and of a number."""
        shapes = [jax.ShapeDtypeStruct(one, jnp.int32) for one in ((self.sizes.all_ranks, 2), ())]
        return placed(self.mesh, shapes, [REPLICATED] * 2)

    def count(self, banks: Sequence[Bank]) -> Program:
        """(counts of each bank…) → [layers, ranks, experts], a copy for all banks."""
        (counts, _), spec = bank_arrays(self.mesh, banks, self.axes), Bank.counts_spec(self.axes)
        name, body = "count_experts", lambda *counts: jnp.concatenate(counts)
        return Program(name, body, self.mesh, counts, spec)

    def _arrays(self, bank: Bank) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns shapes of the arrays that have a bank's slots: its pool, if it has one, and the
        leaves that are not there."""
        outer, all_specs = [len(bank.layers)] * self._stacked, self.template.specs(self.rules)
        leaves = [self.template.leaves[place] for place in self._apart]
        shapes = [jax.ShapeDtypeStruct((*outer, *leaf.shape), leaf.dtype) for leaf in leaves]
        specs = [PartitionSpec(*(None for _ in outer), *all_specs[n]) for n in self._apart]
        if self._pools is not None:
            pool = jax.ShapeDtypeStruct(self._pools.over(self.mesh.size), jnp.int32)
            shapes, specs = [pool, *shapes], [PartitionSpec(tuple(self.mesh.axis_names)), *specs]
        return placed(self.mesh, shapes, specs)

    def _slot(self, bank: Bank, place: int, layer: Array) -> tuple[int, tuple[Array | int, ...]]:
        """Returns the array of `_arrays` that has a leaf, and the layer's first slot there."""
        if self._pools is not None and place in self._pooled:
            first = self._pools.firsts(bank.first, len(bank.layers))[place]
            return 0, (first + layer * self.sizes.local,)
        number = self._apart.index(place) + (self._pools is not None)
        return number, (layer, 0) if self._stacked else (0,)


def _specs(arrays: Iterable[Any]) -> tuple[PartitionSpec, ...]:
    return tuple(array.sharding.spec for array in arrays)


def add_load(
    counts: UInt32[Array, "layers 1 experts"], load: Int32[Array, "layers experts"]
) -> UInt32[Array, "layers 1 experts"]:
    """Adds the tokens that a device's experts just got to its counts."""
    return counts + load[:, None].astype(counts.dtype)
