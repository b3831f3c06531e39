"""The weights of colocated mode: both roles', with the layers of a run stacked."""

import functools
from collections.abc import Callable, Sequence
from typing import Literal

from jax.sharding import Mesh, PartitionSpec

from jaxserve.checkpoint.manifest import blocks_of
from jaxserve.checkpoint.source import CheckpointNames, Sources
from jaxserve.mesh import ATTENTION_RULES, COLOCATED_FFN_RULES, Rules, cached_sharding
from jaxserve.model.module import Template
from jaxserve.roles.colocated_programs import ColocatedPrograms
from jaxserve.roles.weights import HeldBlock, LeafSource, Leaves, load_leaves


class ColocatedWeights:
    """Embedding, head, and per run of equal layers the stacked leaves of both roles, flat.

    Attributes:
      flat: those.
      modules: of prediction modules, likewise: what they have beside their layers, then the leaves
        of both roles; empty without any.
    """

    def __init__(self, source: LeafSource, names: CheckpointNames, programs: ColocatedPrograms):
        templates, mesh = programs.templates, programs.mesh
        flat = load_leaves(source, templates.embedding, names.embedding, mesh, ATTENTION_RULES)
        self.head = load_leaves(source, templates.head, names.head, mesh, ATTENTION_RULES)
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
    return tuple(source.leaves(template, layers, [cached_sharding(mesh, s) for s in specs]))
