"""Computes the bytes that the ffn role takes on each of its devices."""

import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxserve.config.deployment import Deployment
from jaxserve.config.model import FFN, ModelConfig
from jaxserve.config.sections import Experts
from jaxserve.mesh import AbstractSubmeshes, AnyMesh, Rules
from jaxserve.model.ffn.block import FFNTemplates
from jaxserve.model.ffn.traffic import exchange_mesh, exchange_of
from jaxserve.roles.activations import FFNWidths, ffn_activations, ffn_widths
from jaxserve.roles.capacity import RoleBytes, block_bytes, shard_bytes, step_sizes
from pallas_kernels.quantize import E8M0, FOUR_BITS


def ffn_bytes(config: ModelConfig, deployment: Deployment) -> tuple[RoleBytes]:
    """Returns the bytes on a device of the ffn role; see `role_bytes`.

    Raises:
      ConfigError: the model cannot be divided over the role's mesh.
    """
    meshes = AbstractSubmeshes(deployment)
    templates = FFNTemplates(config, deployment, meshes)
    kinds = [config.layer(layer).ffn for layer in range(config.all_layers)]
    blocks = [(template, kinds.count(kind)) for kind, template in templates.ffn.items()]
    step = _activations(config, deployment)
    if deployment.topology.has("colocated"):
        step += _arranged(templates, meshes.ffn, meshes.ffn_rules)
    if config.platform == "gpu":
        step += _decoded(templates, meshes.ffn, meshes.ffn_rules)
    part = RoleBytes(
        "ffn",
        deployment.ffn.devices,
        block_bytes(blocks, meshes.ffn, meshes.ffn_rules),
        0,
        step,
        _moving(templates, meshes.ffn, meshes.ffn_rules, deployment.experts),
    )
    return (part,)


def _moving(templates: FFNTemplates, mesh: AnyMesh, rules: Rules, settings: Experts) -> int:
    """Returns the bytes of room for moving experts on a device: one expert of a layer, and a second
    one if experts are read for it; 0 without ranks that could exchange experts."""
    ranks = templates.slots.all_ranks
    template = templates.moe
    if ranks == 1 or template is None:
        return 0
    size = sum(
        shard_bytes((ranks, *leaf.shape[1:]), leaf.dtype, NamedSharding(mesh, spec))
        for leaf, spec in zip(template.leaves, template.specs(rules), strict=True)
        if leaf.of_slots
    )
    return size if settings.source == "devices" else 2 * size


def _arranged(templates: FFNTemplates, mesh: AnyMesh, rules: Rules) -> int:
    """Returns the bytes that a colocated step adds to the scales and zero points of experts in 4
    bits. On TPUs those of all layers are first rearranged for their kernel: INT4's in FP32, MXFP4's
    as bytes. Compiled for Qwen3-30B-A3B in INT4, that took 2.6 times their size on two v7x devices,
    1.9 times on four v6e. AFD rearranges one layer's at a time."""
    template = templates.moe
    if template is None or not any(leaf.dtype in FOUR_BITS for leaf in template.leaves):
        return 0
    layers = sum(kind.ffn.router is not None for kind in templates.config.decoder)
    wide = jnp.dtype(jnp.float32)
    return 3 * sum(
        layers
        * shard_bytes(leaf.shape, E8M0 if leaf.dtype == E8M0 else wide, NamedSharding(mesh, spec))
        for leaf, spec in zip(template.leaves, template.specs(rules), strict=True)
        if leaf.of_slots and leaf.name.endswith(("scales", "zeros"))
    )


def _decoded(templates: FFNTemplates, mesh: AnyMesh, rules: Rules) -> int:
    """Returns the bytes of a layer's MXFP4 experts in the activations' dtype, in which GPUs
    multiply them (`grouped_matmul/api.py`)."""
    template = templates.moe
    if template is None:
        return 0
    return sum(
        shard_bytes(leaf.shape, templates.dtype, NamedSharding(mesh, spec))
        for leaf, spec in zip(template.leaves, template.specs(rules), strict=True)
        if leaf.of_slots and leaf.dtype == jnp.float4_e2m1fn
    )


def _activations(config: ModelConfig, deployment: Deployment) -> int:
    """Bytes of a step's activations on an ffn device."""
    mesh = exchange_mesh(deployment)

    def widths(spec: FFN) -> FFNWidths:
        alltoall = spec.router is not None and exchange_of(config, deployment) == "alltoall"
        top_k = spec.router.top_k if spec.router else 0
        return ffn_widths(spec.d_ff, spec.expert_d_ff, top_k, mesh, alltoall=alltoall)

    step, attention = step_sizes(config, deployment), deployment.attention
    kinds = {kind.ffn for kind in config.kinds()}
    return ffn_activations(step, mesh, attention.dp, attention.devices, map(widths, kinds))
