"""Computes the bytes that the attention role takes on each of its devices."""

from jax.sharding import NamedSharding

from jaxserve.config.deployment import Deployment
from jaxserve.config.model import Attention, ModelConfig
from jaxserve.mesh import ATTENTION_RULES, AbstractSubmeshes
from jaxserve.model.attention.kv_cache import PAGES_SPEC, page_pools
from jaxserve.model.blocks import AttentionTemplates
from jaxserve.roles.capacity import FP32, RoleBytes, StepSizes, block_bytes, shard_bytes, step_sizes


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
    step, tp, held = step_sizes(config, deployment), deployment.attention.tp, {0: 0, 1: 0}
    for pool in page_pools(config, deployment):
        for table, array in zip(pool.tables, pool.arrays, strict=True):
            size = shard_bytes(array.shape, array.dtype, sharding)
            held[table] += len(pool.layers) * size
    part = RoleBytes(
        "attention",
        deployment.attention.devices,
        weights,
        held[0],
        max(attention_activations(step, spec, tp) for spec in config.attentions()),
        rings=held[1],
    )
    return (part,)


def attention_activations(step: StepSizes, spec: Attention, tp: int) -> int:
    """Returns the bytes of activations on an attention device.

    For every lane: the residual stream of its DP group's tokens, a message and its answer in
    transit, and the token counts for penalties (an int32 for each slot and token of the
    vocabulary).

    For the one program that runs at a time, the larger of two: one layer's normed tokens, heads
    (`head_width`), what its indexer computes on every device (queries before and after RoPE, and
    positions, each as large as two numbers), and FP32 output; or the FP32 logits, three times for
    the sampler, of every slot's last token and its drafts. Attention scores are not counted,
    because kernels keep them on the chip.
    """
    tokens, size, d = step.tokens, step.size, step.d_model
    rows = -(-tokens // tp)
    lane = tokens * step.residual * size + rows * (step.packed + d * size)
    index = spec.indexer
    shared = 2 * (index.heads * index.head_dim + index.top_k) if index else 0
    numbers = spec.q_heads // tp * spec.head_width + shared + d
    attend = tokens * numbers * size + tokens * d * FP32
    logits = step.slots * step.vocab * FP32
    counts = logits  # as many, of four bytes
    return step.lanes * (lane + counts) + max(attend, 3 * (1 + step.drafts) * logits)
