"""Counts the parameters of a model from its templates, for `serve --check` and for sizing."""

import math
from typing import NamedTuple

import msgspec

from jaxserve.config.deployment import Deployment, SchedulerLimits
from jaxserve.config.model import ModelConfig
from jaxserve.mesh import AbstractSubmeshes
from jaxserve.model.module import Template
from jaxserve.model.templates import ModelTemplates


class Parameters(NamedTuple):
    """Parameter counts of a text model, without scales and zero points."""

    total: int
    """All parameters but those of multi-token prediction; a tied head counts once."""
    activated: int
    """Parameters that take part in computing one token: all but the embedding, of which it reads
    one row, and the experts that it is not routed to."""
    prediction: int
    """Parameters of the prediction modules, without the embedding and head that they share."""


def count_parameters(config: ModelConfig) -> Parameters:
    """Returns the model's parameter counts, which do not depend on number formats."""
    templates = _whole(config)
    embedding, head = _size(templates.embedding), _size(templates.head)
    if config.tied_head:
        head -= config.d_model * config.vocab
    total, activated = embedding + head, head + (embedding if config.tied_head else 0)
    for layer in range(config.layers):
        kind = config.layer(layer)
        for template in (templates.attention[kind], templates.ffn[kind.ffn]):
            total += _size(template)
            activated += _activated(template, config)
    return Parameters(total, activated, _predictions(config))


def _predictions(config: ModelConfig) -> int:
    """Returns the parameters of all prediction modules (DeepSeek-V3 §2.2): each has a layer, a
    projection to it, and norms."""
    whole = _whole(msgspec.structs.replace(config, modules=len(config.predictors)))
    return sum(
        _size(block)
        for kind in config.predictors
        for block in (whole.attention[kind], whole.ffn[kind.ffn], whole.prediction)
    )


def _whole(config: ModelConfig) -> ModelTemplates:
    """Returns the templates for one device in each role, without padding and scales."""
    plain = msgspec.structs.replace(config, stored="plain")
    one = Deployment(model="", scheduler=SchedulerLimits(max_length=2))
    return ModelTemplates(plain, one, AbstractSubmeshes(one))


def _size(template: Template) -> int:
    return sum(math.prod(leaf.shape) for leaf in template.leaves)


def _activated(template: Template, config: ModelConfig) -> int:
    return sum(
        math.prod(leaf.shape)
        * (config.top_k if leaf.of_slots else 1)
        // (config.experts if leaf.of_slots else 1)
        for leaf in template.leaves
    )
