"""AFD with random weights and one bucket, for `host.py` and `overlap.py`.

No checkpoint, no engine, no control plane: programs, weights and workers, the same in every process
that calls it.
"""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.bench import stages
from jaxserve.checkpoint.random_leaves import RandomLeaves
from jaxserve.checkpoint.step3 import step3_names
from jaxserve.config.deployment import Deployment
from jaxserve.config.load import load_deployment
from jaxserve.config.model import ModelConfig
from jaxserve.link.dispatch.contract import Contract
from jaxserve.link.runtime_link import RuntimeLink
from jaxserve.mesh import Submeshes, cached_sharding, expert_axes
from jaxserve.model.ffn.placement import SlotSizes, home_slots, replica_table
from jaxserve.model.matrix_formats import placed
from jaxserve.model.templates import ModelTemplates
from jaxserve.roles import pipelines
from jaxserve.roles.attention_programs import (
    AttentionExecutables,
    AttentionPrograms,
    AttentionWeights,
    build_attention,
)
from jaxserve.roles.batch_layout import FROM_DEVICE
from jaxserve.roles.compilation import use_compilation_cache
from jaxserve.roles.expert_programs import Bank
from jaxserve.roles.expert_slots import ExpertSlots
from jaxserve.roles.ffn import FFNPrograms, FFNWeights, build_ffn
from jaxserve.roles.layout import Bucket
from jaxserve.roles.pipelines import OpenModel
from jaxserve.roles.program import REPLICATED
from jaxserve.roles.step_plan import StepPlan


class RandomModel(NamedTuple):
    """Both roles of a randomly initialised model in this process, compiled and loaded."""

    deployment: Deployment
    config: ModelConfig
    bucket: Bucket
    attention: AttentionPrograms
    ffn: FFNPrograms
    executables: AttentionExecutables
    weights: AttentionWeights
    ffn_weights: FFNWeights
    slots: ExpertSlots | None
    link: RuntimeLink


def decode_plan(deployment: Deployment, lane: int, kv_length: int) -> StepPlan:
    """Builds a decode step with every slot taken; all tokens come from the device. The sequences of
    all lanes use the same pages, whose text no one reads."""
    slots = deployment.scheduler.slots
    bucket = bucket_of(deployment)
    return stages.decode_plan(deployment, lane, 0, bucket, slots, kv_length, token_id=FROM_DEVICE)


def deployment_of(*, slots: int, max_length: int, page_size: int, **overrides: Any) -> Deployment:
    """FP32, one bucket of one token a slot, and pages for every sequence of one lane."""
    pages = -(-max_length // page_size)
    return load_deployment(
        ".",
        {
            "dtype": "float32",
            "cache.page_size": page_size,
            "cache.pages": slots * pages,
            "scheduler.slots": slots,
            "scheduler.max_length": max_length,
            "scheduler.token_budget": slots,
            "scheduler.token_buckets": [slots],
            "scheduler.page_buckets": [pages],
            **overrides,
        },
    )


def bucket_of(deployment: Deployment) -> Bucket:
    """The one bucket."""
    limits = deployment.scheduler
    return Bucket(limits.token_buckets[0], limits.page_buckets[0])


def templates_of(deployment: Deployment, config: ModelConfig) -> tuple[ModelTemplates, Submeshes]:
    """Builds the templates of the programs, on the devices of this runtime."""
    meshes = Submeshes(deployment)
    return ModelTemplates(placed(config, meshes.ffn), deployment, meshes), meshes


def idle_experts(sizes: SlotSizes, mesh: Mesh) -> tuple[jax.Array, jax.Array]:
    """Table and counts of a layer of the ffn role whose experts are at home."""
    bank = Bank((0,), sizes)
    table = replica_table(home_slots(sizes), sizes)[None]
    return (
        jax.device_put(table, cached_sharding(mesh, REPLICATED)),
        jax.device_put(
            np.zeros(bank.counts.shape, bank.counts.dtype),
            cached_sharding(mesh, bank.counts_spec(expert_axes(mesh))),
        ),
    )


def build(deployment: Deployment, config: ModelConfig) -> RandomModel:
    """Compiles and fills both roles on the devices of this process."""
    use_compilation_cache()
    templates, meshes = templates_of(deployment, config)
    bucket, names, source = bucket_of(deployment), step3_names(config), RandomLeaves()
    attention, executables, weights = build_attention(
        templates, deployment, meshes.attention, source, names
    )
    ffn, _, ffn_weights, slots = build_ffn(templates, deployment, meshes.ffn, source, names)
    return RandomModel(
        deployment,
        config,
        bucket,
        attention,
        ffn,
        executables[bucket],
        weights,
        ffn_weights,
        slots,
        RuntimeLink(
            deployment.link.transport,
            Contract.of(config, deployment),
            meshes.attention,
            meshes.ffn,
            [bucket.tokens],
        ),
    )


def build_driver(deployment: Deployment, config: ModelConfig) -> Any:
    """Builds this process's part of the deployment's pipeline, as the engine does."""
    use_compilation_cache()
    templates, meshes = templates_of(deployment, config)
    model = OpenModel(templates.config, step3_names(config), meshes, templates, RandomLeaves())
    return pipelines.build(model, deployment, None)
