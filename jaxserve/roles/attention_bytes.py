"""Computes the bytes that the attention role takes on each of its devices."""

from jax.sharding import NamedSharding

from jaxserve.config.deployment import Deployment
from jaxserve.config.model import ModelConfig
from jaxserve.mesh import ATTENTION_RULES, AbstractSubmeshes
from jaxserve.model.attention.kv_cache import PAGES_SPEC, page_pools
from jaxserve.model.blocks import AttentionTemplates
from jaxserve.roles.activations import attention_activations, head_width, shared_width
from jaxserve.roles.capacity import RoleBytes, block_bytes, shard_bytes, step_sizes


def attention_weights(config: ModelConfig, deployment: Deployment, *, ends: bool = True) -> int:
    """Returns the bytes of weights on a device of the attention role; see `role_bytes`.

    Args:
      ends: whether embedding, head and what modules have beside their layers count.

    Raises:
      ConfigError: the model cannot be divided over the role's mesh.
    """
    meshes = AbstractSubmeshes(deployment)
    templates = AttentionTemplates(config, deployment, meshes)
    kinds = [config.layer(layer) for layer in range(config.all_layers)]
    blocks = [
        (templates.embedding, int(ends)),
        (templates.head, int(ends)),
        (templates.prediction, config.modules * ends),
        *((template, kinds.count(kind)) for kind, template in templates.attention.items()),
    ]
    return block_bytes(blocks, meshes.attention, ATTENTION_RULES)


def attention_bytes(
    config: ModelConfig, deployment: Deployment, weights: int | None = None
) -> tuple[RoleBytes]:
    """Returns the bytes on a device of the attention role; see `role_bytes`.

    Args:
      weights: their bytes, if they are known.

    Raises:
      ConfigError: the model cannot be divided over the role's mesh.
    """
    if weights is None:
        weights = attention_weights(config, deployment)
    sharding = NamedSharding(AbstractSubmeshes(deployment).attention, PAGES_SPEC)
    held = {0: 0, 1: 0}
    for pool in page_pools(config, deployment):
        for table, array in zip(pool.tables, pool.arrays, strict=True):
            size = shard_bytes(array.shape, array.dtype, sharding)
            held[table] += len(pool.layers) * size
    part = RoleBytes(
        "attention",
        deployment.attention.devices,
        weights,
        held[0],
        _activations(config, deployment),
        rings=held[1],
    )
    return (part,)


def _activations(config: ModelConfig, deployment: Deployment) -> int:
    """Bytes of a step's activations on an attention device."""
    step, tp = step_sizes(config, deployment), deployment.attention.tp
    return max(
        attention_activations(step, spec.q_heads, tp, head_width(spec), shared_width(spec))
        for spec in config.attentions()
    )
