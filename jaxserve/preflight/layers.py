"""Models cut down to some of their layers, for checks that need not run all."""

from collections.abc import Sequence

import msgspec

from jaxserve.checkpoint.source import CheckpointNames
from jaxserve.config.model import ModelConfig


def first_of_each_kind(
    config: ModelConfig, names: CheckpointNames
) -> tuple[ModelConfig, CheckpointNames]:
    """The model with the first layer of each kind alone."""
    first = {config.layer(layer): layer for layer in reversed(range(config.layers))}
    return only_layers(config, names, sorted(first.values()))


def only_layers(
    config: ModelConfig, names: CheckpointNames, layers: Sequence[int]
) -> tuple[ModelConfig, CheckpointNames]:
    """The model with these layers alone, without prediction modules."""
    kinds = tuple(config.decoder[layer] for layer in layers)
    config = msgspec.structs.replace(config, decoder=kinds, predictors=(), modules=0)
    names = names._replace(
        attention=[names.attention[layer] for layer in layers],
        ffn=[names.ffn[layer] for layer in layers],
        predictions=[],
    )
    return config, names
