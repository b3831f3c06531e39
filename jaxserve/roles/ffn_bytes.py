"""Computes the bytes that the ffn role takes on each of its devices."""

import itertools
import math
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxserve.config.deployment import Deployment
from jaxserve.config.model import FFN, ModelConfig
from jaxserve.link.dispatch.contract import MOST_MESSAGES
from jaxserve.mesh import AbstractSubmeshes
from jaxserve.model.ffn.block import FFNTemplates
from jaxserve.model.ffn.traffic import ExchangeMesh, exchange_mesh, exchange_of
from jaxserve.model.module import TemplateLeaf
from jaxserve.roles.capacity import FP32, RoleBytes, StepSizes, block_bytes, shard_bytes, step_sizes
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


def ffn_activations(
    step: StepSizes,
    mesh: ExchangeMesh,
    dp: int,
    pieces: int,
    kinds: Mapping[FFN, bool],
    domains: int = 1,
    messages: int = 1,
) -> int:
    """Returns the bytes of activations on an ffn device, which sees the rows of all DP groups.

    For every lane of every domain: a message's rows and their answer in transit. For the one layer
    that runs at a time, over the messages of a pass: all rows packed, unpacked, and the result in
    FP32; the hidden rows of the dense FFN or shared expert; and for every row and routed expert of
    it the sorted row, gate, up and hidden values, and the output, with room for an FP32 copy, which
    accelerators do not make.

    Routing decides at run time how many of these rows belong to a device; in the worst case all do,
    with the all-to-all, too. An all-to-all also holds results in the model's dtype, the device's
    own rows sorted, a copy for each rank that they may go to, and the results that come back for
    them.

    Args:
      dp: DP groups of a domain.
      pieces: attention devices.
      kinds: whether an all-to-all exchanges the rows of a layer's routed experts, by its kind.
      domains: attention workers whose messages arrive here.
      messages: messages that a pass runs side by side, padding included.
    """
    size, d, packed = step.size, step.d_model, step.packed
    rows, devices = dp * step.tokens, mesh.ranks * mesh.tensor
    arriving = -(-rows // pieces) * -(-pieces // devices) * mesh.instances
    lanes = max(step.lanes * domains, messages) if mesh.split else 1
    rows *= messages
    hidden = 2 * FP32 + size

    def layer(spec: FFN, alltoall: bool) -> int:
        top_k = spec.router.top_k if spec.router else 0
        apart = top_k > 0 and mesh.shared > 0  # ranks of its own have the shared expert
        whole = 0 if apart else spec.d_ff
        held = rows * (packed + d * (size + FP32) + -(-whole // devices) * hidden)
        if top_k:
            # The most experts of one row that can all lie on the same device.
            choices = max(top_k, apart * spec.d_ff // spec.expert_d_ff)
            routed = d * (2 * size + FP32) + -(-spec.expert_d_ff // mesh.tensor) * hidden
            held += rows * choices * routed
            if alltoall:
                sent = math.ceil(rows * mesh.own) * min(top_k + apart, mesh.ranks)
                held += rows * d * size + sent * (packed + mesh.tensor * d * size)
        return held

    return lanes * arriving * (packed + d * size) + max(itertools.starmap(layer, kinds.items()))
