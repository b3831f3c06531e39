"""Computes the bytes that the ffn role takes on each of its devices."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxserve.config.deployment import Deployment
from jaxserve.config.model import ModelConfig
from jaxserve.link.dispatch.contract import MOST_MESSAGES
from jaxserve.mesh import AbstractSubmeshes
from jaxserve.model.ffn.block import FFNTemplates
from jaxserve.model.ffn.traffic import exchange_mesh, exchange_of
from jaxserve.model.module import TemplateLeaf
from jaxserve.roles.activations import ffn_activations
from jaxserve.roles.capacity import RoleBytes, block_bytes, shard_bytes, step_sizes
from pallas_kernels.quantize import E8M0, FOUR_BITS

ExpertLeaves = Sequence[tuple[TemplateLeaf, NamedSharding]]
"""Leaves of a layer's routed experts, and how they are divided."""


def ffn_bytes(config: ModelConfig, deployment: Deployment) -> tuple[RoleBytes]:
    """Computes the bytes on a device of the ffn role; see `role_bytes`.

    Raises:
      ConfigError: the model cannot be divided over the role's mesh.
    """
    meshes = AbstractSubmeshes(deployment)
    mesh, rules = meshes.ffn, meshes.ffn_rules
    templates = FFNTemplates(config, deployment, meshes)
    kinds = [config.layer(layer).ffn for layer in range(config.all_layers)]
    blocks = [(template, kinds.count(kind)) for kind, template in templates.ffn.items()]
    experts: ExpertLeaves = ()
    if (moe := templates.moe) is not None:
        divided = zip(moe.leaves, moe.specs(rules), strict=True)
        experts = [(leaf, NamedSharding(mesh, spec)) for leaf, spec in divided if leaf.of_slots]
    step = pass_activations(config, deployment)
    if deployment.topology.has("colocated") and config.platform == "tpu":
        step += sum(kind.ffn.router is not None for kind in config.decoder) * _arranged(experts)
    if config.platform == "gpu":
        step += _decoded(experts, templates.dtype)
    ranks, moving = templates.slots.all_ranks, 0
    if ranks > 1:  # room for one expert on its way to a device; experts that are read take a second
        every = (shard_bytes((ranks, *one.shape[1:]), one.dtype, at) for one, at in experts)
        moving = sum(every) * (1 if deployment.experts.source == "devices" else 2)
    weights = block_bytes(blocks, mesh, rules)
    return (RoleBytes("ffn", deployment.ffn.devices, weights, 0, step, moving),)


def _arranged(experts: ExpertLeaves) -> int:
    """Returns the bytes that a colocated step adds to the scales and zero points of a layer's
    experts in 4 bits. On TPUs those of all layers are first rearranged for their kernel: INT4's in
    FP32, MXFP4's as bytes. Compiled for Qwen3-30B-A3B in INT4, that took 2.6 times their size on
    two v7x devices, 1.9 times on four v6e. AFD rearranges one layer's at a time."""
    if not any(leaf.dtype in FOUR_BITS for leaf, _ in experts):
        return 0
    wide = jnp.dtype(jnp.float32)
    return 3 * sum(
        shard_bytes(leaf.shape, E8M0 if leaf.dtype == E8M0 else wide, sharding)
        for leaf, sharding in experts
        if leaf.name.endswith(("scales", "zeros"))
    )


def _decoded(experts: ExpertLeaves, dtype: jnp.dtype) -> int:
    """Returns the bytes of a layer's MXFP4 experts in the activations' dtype, in which GPUs
    multiply them (`grouped_matmul/api.py`)."""
    return sum(
        shard_bytes(leaf.shape, dtype, sharding)
        for leaf, sharding in experts
        if leaf.dtype == jnp.float4_e2m1fn
    )


def pass_activations(config: ModelConfig, deployment: Deployment, messages: int = 1) -> int:
    """Returns the bytes of activations on an ffn device while it runs the largest messages.

    Args:
      messages: messages of a pass, padding included.
    """
    mesh, a = exchange_mesh(deployment), deployment.attention
    alltoall = exchange_of(config, deployment) == "alltoall"
    kinds = {kind.ffn: alltoall for kind in config.kinds()}
    step, domains = step_sizes(config, deployment), deployment.domains
    return ffn_activations(step, mesh, a.dp, a.devices, kinds, domains, messages)


def most_messages(config: ModelConfig, deployment: Deployment, available: int | None) -> int:
    """Returns the most messages, a power of two, that a pass of an ffn worker with a runtime of its
    own may have: as many as fit.

    Args:
      available: bytes of a device; None: unknown.
    """
    count = 1 if deployment.link.batching == "rotation" else MOST_MESSAGES
    if count == 1 or available is None:
        return count
    (alone,) = ffn_bytes(config, deployment)
    room = available - alone.total + alone.activations
    while count > 1 and pass_activations(config, deployment, count) > room:
        count //= 2
    return count
