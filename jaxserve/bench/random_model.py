"""Deployments with random weights and one bucket, for benches that need no checkpoint.

Programs, weights and workers are the same in every process that builds them. Used by `experts.py`,
`hand_off.py`, `load.py`, `mixes.py` and `pipelines.py`.
"""

from typing import Any

import jax

from jaxserve.bench import stages
from jaxserve.bench.workers import barrier
from jaxserve.checkpoint.random_leaves import RandomLeaves, open_random
from jaxserve.checkpoint.source import CheckpointNames
from jaxserve.checkpoint.step3 import step3_names
from jaxserve.config.attention.mfa import MFA
from jaxserve.config.deployment import Deployment
from jaxserve.config.load import load_deployment
from jaxserve.config.model import FFN, LayerKind, ModelConfig, Rope
from jaxserve.engine.engine import Engine
from jaxserve.engine.runtime import warm_up
from jaxserve.fleet.assembly import Options, build_runtime, make_engine
from jaxserve.mesh import Submeshes
from jaxserve.model.matrix_formats import placed
from jaxserve.model.templates import ModelTemplates
from jaxserve.roles import pipelines
from jaxserve.roles.compilation import use_compilation_cache
from jaxserve.roles.pipelines import OpenModel
from jaxserve.roles.step_arrays import FROM_DEVICE
from jaxserve.roles.step_plan import StepPlan


def model_config(
    layers: int, heads: tuple[int, int, int], ffn: FFN, *, d_model: int, positions: int
) -> ModelConfig:
    """Describes a decoder with equal layers.

    Args:
      heads: query heads, width of a head, and width of the queries' latent.
      ffn: the FFN of every layer.
    """
    query_heads, head_dim, latent = heads
    rope = Rope(theta=1e4)
    attention = MFA(q_heads=query_heads, kv_heads=1, head_dim=head_dim, latent=latent, rope=rope)
    return ModelConfig(
        vocab=64,
        d_model=d_model,
        decoder=(LayerKind(attention, ffn),) * layers,
        norm_epsilon=1e-5,
        max_positions=positions,
    )


def decode_plan(deployment: Deployment, lane: int, kv_length: int) -> StepPlan:
    """Builds a decode step with every slot taken; all tokens come from the device. The sequences of
    all lanes use the same pages, because nothing reads their text."""
    slots = deployment.scheduler.slots
    bucket = stages.bucket_of(deployment, slots, kv_length)
    return stages.decode_plan(deployment, lane, 0, bucket, slots, kv_length, token_id=FROM_DEVICE)


def deployment_of(*, slots: int, max_length: int, page_size: int, **overrides: Any) -> Deployment:
    """Describes a deployment in FP32 with one bucket."""
    keys = one_bucket(slots, max_length, page_size)
    return load_deployment(".", {"dtype": "float32", **keys, **overrides})


def one_bucket(slots: int, max_length: int, page_size: int) -> dict[str, Any]:
    """Returns keys of a deployment with one token a slot, and pages for all of a lane."""
    pages = -(-max_length // page_size)
    return {
        "cache.page_size": page_size,
        "cache.pages": slots * pages,
        "scheduler.slots": slots,
        "scheduler.max_length": max_length,
        "scheduler.token_budget": slots,
        "scheduler.token_buckets": [slots],
        "scheduler.page_buckets": [pages],
    }


def templates_of(deployment: Deployment, config: ModelConfig) -> tuple[ModelTemplates, Submeshes]:
    """Builds the templates of the programs, on the devices of this runtime."""
    meshes = Submeshes(deployment)
    return ModelTemplates(placed(config, meshes.ffn), deployment, meshes), meshes


def random_engine(deployment: Deployment, config: ModelConfig, names: CheckpointNames) -> Engine:
    """Builds an engine with random weights that ends no request early, not yet started."""
    runtime = build_runtime(deployment, Options(config=config, names=names, weights=open_random))
    warm_up(runtime)
    return make_engine(runtime, eos_token_ids=frozenset())


def build_driver(deployment: Deployment, config: ModelConfig) -> Any:
    """Builds this process's part of the deployment's pipeline, as the engine does, and waits for
    the other processes. One with fewer programs would give up on a collective after 30 s."""
    use_compilation_cache()
    templates, meshes = templates_of(deployment, config)
    model = OpenModel(templates.config, step3_names(config), meshes, templates, RandomLeaves())
    driver = pipelines.build(model, deployment, None)
    if jax.process_count() > 1:
        barrier(f"built {deployment.pipeline}", 900.0)
    return driver
