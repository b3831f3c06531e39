"""Counts the parameters of a model from its templates, for `serve --check` and for sizing."""

import math
from typing import NamedTuple

import msgspec

from jaxserve.config.deployment import Deployment, SchedulerLimits
from jaxserve.config.model import MLA, Compressed, DeltaNet, ModelConfig
from jaxserve.mesh import AbstractSubmeshes
from jaxserve.model.attention.expanding import least_expanded
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
    """Parameters of the prediction modules (DeepSeek-V3 §2.2), each with a layer, a projection to
    it, and norms; they share embedding and head."""


def count_parameters(config: ModelConfig) -> Parameters:
    """Returns the model's parameter counts, which do not depend on number formats."""
    templates = _whole(config)
    embedding, head = _size(templates.embedding), _size(templates.head)
    if config.tied_head:
        head -= config.d_model * config.vocab
    total, activated = embedding + head, head + (embedding if config.tied_head else 0)
    for kind in config.decoder:
        for template in (templates.attention[kind], templates.ffn[kind.ffn]):
            total += _size(template)
            activated += _activated(template, config)
    predicting = (
        block
        for kind in config.predictors
        for block in (templates.attention[kind], templates.ffn[kind.ffn], templates.prediction)
    )
    return Parameters(total, activated, sum(map(_size, predicting)))


def attention_cost(config: ModelConfig, platform: str, chunk: int) -> float:
    """Returns what attention adds to the cost of a prompt of n tokens, over n², where the n tokens'
    linear maps cost n, by FLOPs.

    A token meets half of the prompt on the mean, and takes two FLOPs for each number of a key, and
    of a value. Windows, states and chosen rows are as long in every prompt; the scores by which an
    indexer chooses are not, and are without values. Long chunks of latent attention, except on
    TPUs, attend to expanded keys and values: each chunk expands all tokens before it again.

    Args:
      platform: of the worker, as JAX names it.
      chunk: tokens of a DP group's step.
    """
    numbers = 0.0
    for kind in config.decoder:
        spec, indexer = kind.attention, getattr(kind.attention, "indexer", None)
        width = float(spec.kv_latent + spec.rope_dim if isinstance(spec, MLA) else spec.head_dim)
        if isinstance(spec, MLA) and platform != "tpu" and chunk >= least_expanded(spec):
            expanded = spec.nope_dim + spec.v_dim
            width = (expanded + spec.rope_dim) / 2 + spec.kv_latent * expanded / (2 * chunk)
        met = indexer.heads * indexer.head_dim / 2 if indexer else spec.q_heads * width
        every = spec.every if isinstance(spec, Compressed) else 1 - min(1, spec.window)
        if every and not isinstance(spec, DeltaNet) and not getattr(indexer, "shared", False):
            numbers += met / every
    return numbers / count_parameters(config).activated


def _whole(config: ModelConfig) -> ModelTemplates:
    """Returns the templates for one device in each role, with all prediction modules, without
    padding and scales."""
    plain = msgspec.structs.replace(config, stored="plain", modules=len(config.predictors))
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
