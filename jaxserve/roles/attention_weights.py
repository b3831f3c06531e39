"""The attention role's weights, as its worker passes them to programs."""

import functools

from jaxserve.checkpoint.manifest import blocks_of
from jaxserve.checkpoint.source import CheckpointNames, Sources
from jaxserve.mesh import ATTENTION_RULES
from jaxserve.model.module import Template
from jaxserve.roles.attention_programs import AttentionPrograms
from jaxserve.roles.weights import HeldBlock, LeafSource, Leaves, load_leaves


class AttentionWeights:
    """Embedding, head, and one tuple of leaves a layer, those of prediction modules included; and
    what these have beside their layers."""

    def __init__(self, source: LeafSource, names: CheckpointNames, programs: AttentionPrograms):
        templates, mesh, config = programs.templates, programs.mesh, programs.config

        def load(template: Template, sources: Sources) -> Leaves:
            return load_leaves(source, template, sources, mesh, ATTENTION_RULES)

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
