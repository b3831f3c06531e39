"""The weights of both roles of a deployment, loaded in this process."""

from typing import NamedTuple

from jaxserve.roles.attention_programs import AttentionPrograms, AttentionWeights
from jaxserve.roles.ffn import FFNPrograms, FFNWeights
from jaxserve.roles.weights import Leaves


class BothRoles(NamedTuple):
    embedding: Leaves
    head: Leaves
    attention: list[Leaves]
    ffn: list[Leaves]
    predictions: list[Leaves]

    @property
    def leaves(self) -> list:
        """All arrays."""
        blocks = (self.embedding, self.head, *self.attention, *self.ffn, *self.predictions)
        return [leaf for block in blocks for leaf in block]


def load_both(source, names, templates, deployment, meshes) -> BothRoles:
    attention = AttentionPrograms(templates, deployment, meshes.attention)
    weights = AttentionWeights(source, names, attention)
    ffn = FFNWeights(source, names, FFNPrograms(templates, deployment, meshes.ffn))
    return BothRoles(
        weights.embedding, weights.head, weights.layers, ffn.layers, weights.predictions
    )
