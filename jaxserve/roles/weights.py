"""Weights and KV pages of a role, as its worker passes them to programs: flat, sharded arrays.

Filled block by block from a checkpoint (`checkpoint/hf.py`) or at random for benches; a process
reads what its own devices hold. Colocated mode stacks the layers of a run.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxserve.checkpoint.source import CheckpointNames, Sources
from jaxserve.mesh import (
    ATTENTION_RULES,
    COLOCATED_FFN_RULES,
    FFN_RULES,
    Rules,
    cached_sharding,
    sharded_zeros,
)
from jaxserve.model.attention.kv_cache import PAGES_SPEC
from jaxserve.model.module import Template
from jaxserve.progress import Progress
from jaxserve.roles.attention_programs import AttentionPrograms
from jaxserve.roles.colocated_programs import ColocatedPrograms
from jaxserve.roles.ffn_programs import FFNPrograms

Leaves = tuple[jax.Array, ...]


class LeafSource(Protocol):
    """Where leaves come from."""

    on_read: Callable[[int], None]
    """Called with the number of bytes of every read, from any thread."""

    @property
    def size(self) -> int | None:
        """Bytes that will be read; None: nothing is."""
        ...

    def leaves(
        self, template: Template, sources: Sources, shardings: Sequence[jax.sharding.Sharding]
    ) -> Iterable[jax.Array]:
        """One block's leaves on their devices, made one by one."""
        ...

    def stacks(
        self,
        template: Template,
        tables: Sequence[Sources],
        shardings: Sequence[jax.sharding.Sharding],
    ) -> Iterable[jax.Array]:
        """The leaves of several blocks of one kind, behind each other in a new first axis."""
        ...


class RandomLeaves:
    """Random weights, the same on every process, for benches without a checkpoint."""

    size = None

    def __init__(self, seed: int = 0):
        self._seed = seed
        self.on_read: Callable[[int], None] = lambda size: None

    def leaves(
        self, template: Template, sources: Sources, shardings: Sequence[jax.sharding.Sharding]
    ) -> list[jax.Array]:
        """Normal values of the modules' own scale."""
        return self._arrays(self._values(template), shardings)

    def stacks(
        self,
        template: Template,
        tables: Sequence[Sources],
        shardings: Sequence[jax.sharding.Sharding],
    ) -> list[jax.Array]:
        """Random leaves of several blocks of one kind, stacked."""
        blocks = [self._values(template) for _ in tables]
        return self._arrays([np.stack(leaf) for leaf in zip(*blocks, strict=True)], shardings)

    def _values(self, template: Template) -> list[np.ndarray]:
        self._seed += 1
        return [np.asarray(value) for value in template.random(self._seed)]

    def _arrays(
        self, values: Sequence[np.ndarray], shardings: Sequence[jax.sharding.Sharding]
    ) -> list[jax.Array]:
        return [
            jax.make_array_from_callback(value.shape, sharding, value.__getitem__)
            for value, sharding in zip(values, shardings, strict=True)
        ]


class _CountedLeaves:
    """Another source, with every block counted."""

    def __init__(self, source: LeafSource, progress: Progress):
        self._source, self._progress = source, progress
        self.on_read, self.size = source.on_read, source.size

    def leaves(
        self, template: Template, sources: Sources, shardings: Sequence[jax.sharding.Sharding]
    ) -> Iterator[jax.Array]:
        """The source's leaves."""
        yield from self._source.leaves(template, sources, shardings)
        self._progress.advance()

    def stacks(
        self,
        template: Template,
        tables: Sequence[Sources],
        shardings: Sequence[jax.sharding.Sharding],
    ) -> Iterator[jax.Array]:
        """The source's stacks."""
        yield from self._source.stacks(template, tables, shardings)
        self._progress.advance(len(tables))


@contextlib.contextmanager
def load_progress(source: LeafSource, blocks: int) -> Iterator[LeafSource]:
    """The source, with its blocks and bytes shown as they come."""
    process = jax.process_index()
    with Progress("load", blocks, total_bytes=source.size, process=process) as progress:
        source.on_read = lambda size: progress.advance(0, size=size)
        yield _CountedLeaves(source, progress)


def _load(
    source: LeafSource, template: Template, sources: Sources, mesh: Mesh, rules: Rules
) -> Leaves:
    shardings = [cached_sharding(mesh, spec) for spec in template.specs(rules)]
    return tuple(source.leaves(template, sources, shardings))


class AttentionWeights:
    """Embedding, head, and one tuple of leaves a layer, those of prediction modules included; and
    what these have beside their layers."""

    def __init__(self, source: LeafSource, names: CheckpointNames, programs: AttentionPrograms):
        templates, mesh, config = programs.templates, programs.mesh, programs.config

        def load(template: Template, sources: Sources) -> Leaves:
            return _load(source, template, sources, mesh, ATTENTION_RULES)

        self.embedding = load(templates.embedding, names.embedding)
        self.head = load(templates.head, names.head)
        self.layers = [
            load(templates.attention[config.kind(layer)], names.attention[layer])
            for layer in range(config.all_layers)
        ]
        self.predictions = [load(templates.prediction, sources) for sources in names.predictions]


class FFNWeights:
    """One tuple of leaves a layer, those of prediction modules included; one with routed experts is
    a bank."""

    def __init__(self, source: LeafSource, names: CheckpointNames, programs: FFNPrograms):
        templates, config = programs.templates, programs.config
        self.layers = [
            _load(
                source,
                templates.ffn[config.kind(layer).ffn],
                names.ffn[layer],
                programs.mesh,
                FFN_RULES,
            )
            for layer in range(config.all_layers)
        ]
        self._banks = [bank.layers[0] for bank in programs.banks]

    def bank(self, number: int) -> Leaves:
        """All leaves of a bank's layer."""
        return self.layers[self._banks[number]]

    def replace_bank(self, number: int, leaves: Leaves) -> None:
        """Replaces all leaves of a bank's layer or layers."""
        self.layers[self._banks[number]] = leaves


class ColocatedWeights:
    """Embedding, head, and per run of equal layers the stacked leaves of both roles, flat.

    Attributes:
      flat: those.
      modules: of prediction modules, likewise: what they have beside their layers, then the leaves
        of both roles; empty without any.
    """

    def __init__(self, source: LeafSource, names: CheckpointNames, programs: ColocatedPrograms):
        templates, mesh = programs.templates, programs.mesh
        flat = _load(source, templates.embedding, names.embedding, mesh, ATTENTION_RULES)
        self.head = _load(source, templates.head, names.head, mesh, ATTENTION_RULES)
        flat += self.head
        self._banks: list[slice] = []
        for kind, start, stop in programs.stacked():
            for template, tables, rules in (
                (templates.attention[kind], names.attention, ATTENTION_RULES),
                (templates.ffn[kind.ffn], names.ffn, COLOCATED_FFN_RULES),
            ):
                flat += _stack(source, template, tables[start:stop], mesh, rules)
            if kind.ffn == "moe":
                self._banks.append(slice(len(flat) - len(template.leaves), len(flat)))
        self.flat: Leaves = flat
        self.modules: Leaves = ()
        if names.predictions:
            kind, first = programs.config.kind(programs.config.layers), programs.config.layers
            for template, tables, rules in (
                (templates.prediction, names.predictions, ATTENTION_RULES),
                (templates.attention[kind], names.attention[first:], ATTENTION_RULES),
                (templates.ffn[kind.ffn], names.ffn[first:], COLOCATED_FFN_RULES),
            ):
                self._own_experts = slice(len(self.modules), None)
                self.modules += _stack(source, template, tables, mesh, rules)

    def bank(self, number: int) -> Leaves:
        """The stacked leaves of a bank's ffn blocks."""
        if number == len(self._banks):
            return self.modules[self._own_experts]
        return self.flat[self._banks[number]]

    def replace_bank(self, number: int, leaves: Leaves) -> None:
        """Replaces all leaves of a bank's layer or layers."""
        if number == len(self._banks):
            self.modules = *self.modules[: self._own_experts.start], *leaves
            return
        place = self._banks[number]
        self.flat = *self.flat[: place.start], *leaves, *self.flat[place.stop :]


def _stack(
    source: LeafSource, template: Template, layers: Sequence[Sources], mesh: Mesh, rules: Rules
) -> Leaves:
    """The layers' leaves along a new first axis."""
    specs = [PartitionSpec(None, *spec) for spec in template.specs(rules)]
    return tuple(source.stacks(template, layers, [cached_sharding(mesh, s) for s in specs]))


def zeroed(arrays: Sequence[jax.ShapeDtypeStruct], mesh: Mesh) -> Sequence[jax.Array]:
    """Pages of these global shapes, made on their devices."""
    sharding = cached_sharding(mesh, PAGES_SPEC)
    return [sharded_zeros(array.shape, array.dtype, sharding) for array in arrays]
