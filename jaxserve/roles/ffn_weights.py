"""The ffn role's weights, as its worker passes them to programs."""

import functools

from jaxserve.checkpoint.source import CheckpointNames
from jaxserve.mesh import ffn_rules
from jaxserve.roles.ffn_programs import FFNPrograms
from jaxserve.roles.weights import HeldBlock, LeafSource, Leaves, load_leaves


class FFNWeights:
    """One tuple of leaves a layer, those of prediction modules included; one with routed experts is
    a bank."""

    def __init__(self, source: LeafSource, names: CheckpointNames, programs: FFNPrograms):
        templates, config = programs.templates, programs.config
        self.layers = [
            load_leaves(
                source,
                templates.ffn[config.kind(layer).ffn],
                names.ffn[layer],
                programs.mesh,
                ffn_rules(programs.mesh),
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
