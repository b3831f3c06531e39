"""Weights and KV pages of a role, as its worker passes them to programs: flat, sharded arrays.

Filled block by block from a checkpoint (`checkpoint/hf.py`) or at random for benches; a process
reads what its own devices hold. Colocated mode stacks the layers of a run.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

import jax
from jax.sharding import Mesh, PartitionSpec

from jaxserve.checkpoint.manifest import blocks_of
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

    @property
    def storage(self) -> "LeafSource":
        """Itself, or where it reads what no running worker gives it."""
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


class HeldBlock(NamedTuple):
    """A block of the checkpoint as a worker has it."""

    name: str
    """As `checkpoint.manifest.blocks_of` names it."""
    sources: Sources
    template: Template
    leaves: Callable[[], Leaves]
    """Those of this moment: moves of experts replace them."""
    layer: int = -1
    """Of an attention or ffn block."""
    entry: int | None = None
    """In leaves that are stacks of several layers'."""


class _CountedLeaves:
    """Another source, with every block counted."""

    def __init__(self, source: LeafSource, progress: Progress):
        self._source, self._progress = source, progress
        self.on_read, self.size = source.on_read, source.size

    @property
    def storage(self) -> LeafSource:
        """The source's."""
        return self._source.storage

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
        self._templates, self._blocks = templates, {b.name: b.sources for b in blocks_of(names)}

    def held(self) -> list[HeldBlock]:
        """What of the checkpoint is here."""
        templates, config = self._templates, self._templates.config
        found = [
            ("embedding", templates.embedding, self.embedding),
            ("head", templates.head, self.head),
        ]
        for layer, leaves in enumerate(self.layers):
            template = templates.attention[config.kind(layer)]
            found.append((f"layers.{layer}.attention", template, leaves))
        for layer, leaves in enumerate(self.predictions, config.layers):
            found.append((f"layers.{layer}.prediction", templates.prediction, leaves))
        return [
            HeldBlock(name, self._blocks[name], template, functools.partial(tuple, leaves))
            for name, template, leaves in found
        ]


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
        self._templates = [templates.ffn[config.kind(n).ffn] for n in range(config.all_layers)]
        self._sources = names.ffn

    def held(self) -> list[HeldBlock]:
        """What of the checkpoint is here."""
        return [
            HeldBlock(
                f"layers.{layer}.ffn",
                self._sources[layer],
                template,
                functools.partial(self.layers.__getitem__, layer),
                layer,
            )
            for layer, template in enumerate(self._templates)
        ]

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
        self._sources = {block.name: block.sources for block in blocks_of(names)}
        self._held: list[HeldBlock] = []
        self._note("embedding", templates.embedding, functools.partial(tuple, flat))
        self._note("head", templates.head, functools.partial(tuple, self.head))
        flat += self.head
        self._banks: list[slice] = []
        for kind, start, stop in programs.stacked():
            for part, template, tables, rules in (
                ("attention", templates.attention[kind], names.attention, ATTENTION_RULES),
                ("ffn", templates.ffn[kind.ffn], names.ffn, COLOCATED_FFN_RULES),
            ):
                place = slice(len(flat), len(flat) + len(template.leaves))
                flat += _stack(source, template, tables[start:stop], mesh, rules)
                leaves = functools.partial(self._leaves, "flat", place)
                for layer in range(start, stop):
                    self._note(f"layers.{layer}.{part}", template, leaves, layer, layer - start)
            if kind.ffn == "moe":
                self._banks.append(slice(len(flat) - len(template.leaves), len(flat)))
        self.flat: Leaves = flat
        self.modules: Leaves = ()
        if names.predictions:
            kind, first = programs.config.kind(programs.config.layers), programs.config.layers
            for part, template, tables, rules in (
                ("prediction", templates.prediction, names.predictions, ATTENTION_RULES),
                ("attention", templates.attention[kind], names.attention[first:], ATTENTION_RULES),
                ("ffn", templates.ffn[kind.ffn], names.ffn[first:], COLOCATED_FFN_RULES),
            ):
                self._own_experts = slice(len(self.modules), None)
                place = slice(len(self.modules), len(self.modules) + len(template.leaves))
                self.modules += _stack(source, template, tables, mesh, rules)
                leaves = functools.partial(self._leaves, "modules", place)
                for index in range(len(tables)):
                    name = f"layers.{first + index}.{part}"
                    self._note(name, template, leaves, first + index, index)

    def held(self) -> list[HeldBlock]:
        """What of the checkpoint is here."""
        return self._held

    def _note(
        self,
        name: str,
        template: Template,
        leaves: Callable[[], Leaves],
        layer: int = -1,
        entry: int | None = None,
    ) -> None:
        self._held.append(HeldBlock(name, self._sources[name], template, leaves, layer, entry))

    def _leaves(self, which: Literal["flat", "modules"], place: slice) -> Leaves:
        leaves: Leaves = getattr(self, which)
        return leaves[place]

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
