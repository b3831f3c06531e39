"""Computes the bytes that a deployment takes on every device, from the templates of its model.

Nothing is allocated and no device is needed, so a deployment of a thousand devices can be checked
on a laptop. Called before anything is loaded (`fleet/assembly.py`, `fleet/role_runtime.py`) and by
`serve --check` (`capacity_report.py`). Reads no files.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import msgspec
from jax.sharding import AbstractMesh, NamedSharding

from jaxserve.config.deployment import Deployment
from jaxserve.config.formats import scaled
from jaxserve.config.model import FFN, MLA, Attention, ModelConfig
from jaxserve.config.sections import Experts
from jaxserve.config.topology import Role
from jaxserve.errors import ConfigError
from jaxserve.mesh import ATTENTION_RULES, AbstractSubmeshes, Rules
from jaxserve.model.attention.kv_cache import PAGES_SPEC, page_pools
from jaxserve.model.blocks import ModelTemplates
from jaxserve.model.ffn.traffic import deployment_row_bytes, exchange_mesh, exchange_of
from jaxserve.model.module import Template
from jaxserve.roles.activations import (
    FFNWidths,
    StepSizes,
    attention_activations,
    ffn_activations,
    latent_width,
)
from jaxserve.roles.layout import Bucket
from pallas_kernels.quantize import array_bytes

GB = 10**9
FP32 = 4


class RoleBytes(NamedTuple):
    """Bytes that each device of a role holds."""

    role: Role
    devices: int
    weights: int
    """Weights in the role's formats, with scales and with padding to equal shares."""
    cache: int
    """KV pages of all layers, those of prediction modules included, with scales."""
    activations: int
    """Activations of the largest step, estimated by `activations.py`."""
    moving: int = 0
    """Room for one expert on its way to a slot (`expert_programs.py`)."""
    rings: int = 0
    """Pages of layers with a window, which keep only the last tokens of a sequence."""

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.weights + self.cache + self.activations + self.moving + self.rings


def role_bytes(config: ModelConfig, deployment: Deployment) -> tuple[RoleBytes, ...]:
    """Returns the bytes on a device of the attention role and of the ffn role; if colocated, on a
    device of the one mesh.

    Additions of the compiler (tiles of an accelerator's memory layout, copies, code) are not
    counted.

    Raises:
      ConfigError: the model cannot be divided over the deployment's meshes.
    """
    meshes = AbstractSubmeshes(deployment)
    templates = ModelTemplates(config, deployment, meshes)
    attention = _bytes(
        [
            (templates.embedding, 1),
            (templates.head, 1),
            (templates.prediction, config.modules),
            *_repeated(templates, "attention"),
        ],
        meshes.attention,
        ATTENTION_RULES,
    )
    ffn = _bytes(_repeated(templates, "ffn"), meshes.ffn, meshes.ffn_rules)
    sharding = NamedSharding(meshes.attention, PAGES_SPEC)
    held = {True: 0, False: 0}
    for pool in page_pools(config, deployment):
        arrays = [_shard_bytes(array.shape, array.dtype, sharding) for array in pool.arrays]
        held[pool.ring] += len(pool.layers) * sum(arrays)
    multiple = step_multiple(deployment)
    tokens = -(-deployment.scheduler.token_budget // multiple) * multiple
    step_attention = _attention_activations(config, deployment, tokens)
    step_ffn = _ffn_activations(config, deployment, tokens)
    devices = deployment.attention.devices
    moving = _moving(templates, meshes.ffn, meshes.ffn_rules, deployment.experts)
    if deployment.topology.has("colocated"):
        weights, step = attention + ffn, step_attention + step_ffn
        step += _arranged(templates, meshes.ffn, meshes.ffn_rules)
        return (RoleBytes("attention", devices, weights, held[False], step, moving, held[True]),)
    return (
        RoleBytes("attention", devices, attention, held[False], step_attention, 0, held[True]),
        RoleBytes("ffn", deployment.ffn.devices, ffn, 0, step_ffn, moving),
    )


def step_multiple(deployment: Deployment) -> int:
    """Returns the number that a DP group's tokens are a multiple of, so that all pieces of a
    message are equal."""
    return 1 if deployment.topology.has("colocated") else deployment.attention.tp


def deployment_buckets(deployment: Deployment) -> list[Bucket]:
    """All buckets that a step may use, ascending; tokens are rounded up to `step_multiple`."""
    limits, multiple = deployment.scheduler, step_multiple(deployment)
    tokens = sorted({-(-size // multiple) * multiple for size in limits.token_buckets})
    return [
        Bucket(size, pages, drafts)
        for size in tokens
        for pages in limits.page_buckets
        for drafts in ((0, deployment.drafts) if size > deployment.drafts > 0 else (0,))
    ]


def token_sizes(deployment: Deployment) -> list[int]:
    """The sizes of steps in tokens a DP group, ascending."""
    return sorted({bucket.tokens for bucket in deployment_buckets(deployment)})


def _repeated(templates: ModelTemplates, role: Role) -> list[tuple[Template, int]]:
    """Returns a role's block templates, each with the number of its layers."""
    config = templates.config
    kinds = [config.layer(layer) for layer in range(config.all_layers)]
    if role == "attention":
        return [(template, kinds.count(kind)) for kind, template in templates.attention.items()]
    ffn = [kind.ffn for kind in kinds]
    return [(template, ffn.count(kind)) for kind, template in templates.ffn.items()]


def _bytes(blocks: Sequence[tuple[Template, int]], mesh: AbstractMesh, rules: Rules) -> int:
    """Returns the bytes of all blocks, each repeated as often as its count says, on one device."""
    return sum(
        count * _shard_bytes(leaf.shape, leaf.dtype, NamedSharding(mesh, spec))
        for template, count in blocks
        for leaf, spec in zip(template.leaves, template.specs(rules), strict=True)
    )


def _moving(templates: ModelTemplates, mesh: AbstractMesh, rules: Rules, settings: Experts) -> int:
    """Returns the bytes of room for moving experts on a device: one expert of a layer, and a second
    one if experts are read for it; 0 without ranks that could exchange experts."""
    ranks = templates.slots.all_ranks
    template = templates.moe
    if ranks == 1 or template is None:
        return 0
    size = sum(
        _shard_bytes((ranks, *leaf.shape[1:]), leaf.dtype, NamedSharding(mesh, spec))
        for leaf, spec in zip(template.leaves, template.specs(rules), strict=True)
        if leaf.of_slots
    )
    return size if settings.source == "devices" else 2 * size


def _arranged(templates: ModelTemplates, mesh: AbstractMesh, rules: Rules) -> int:
    """Returns the bytes that a colocated step adds to the scales and zero points of INT4 experts.
    On TPUs those of all layers are first rearranged for their kernel, in FP32. Compiled for
    Qwen3-30B-A3B, that took 2.6 times their size on two v7x devices, 1.9 times on four v6e. AFD
    rearranges one layer's at a time."""
    template = templates.moe
    if template is None or not any(leaf.dtype == jnp.int4 for leaf in template.leaves):
        return 0
    layers = sum(kind.ffn.router is not None for kind in templates.config.decoder)
    return 3 * sum(
        layers * _shard_bytes(leaf.shape, jnp.dtype(jnp.float32), NamedSharding(mesh, spec))
        for leaf, spec in zip(template.leaves, template.specs(rules), strict=True)
        if leaf.of_slots and leaf.dtype != jnp.int4
    )


def _shard_bytes(shape: tuple[int, ...], dtype: jnp.dtype, sharding: NamedSharding) -> int:
    return array_bytes(sharding.shard_shape(shape), dtype)


def _step_sizes(config: ModelConfig, deployment: Deployment, tokens: int) -> StepSizes:
    return StepSizes(
        tokens=tokens,
        slots=deployment.scheduler.slots,
        lanes=deployment.lanes,
        drafts=deployment.drafts,
        d_model=config.d_model,
        vocab=config.vocab,
        packed=deployment_row_bytes(config, deployment).packed,
        size=jnp.dtype(deployment.dtype).itemsize,
    )


def _attention_activations(config: ModelConfig, deployment: Deployment, tokens: int) -> int:
    """Bytes of a step's activations on an attention device."""
    step, tp = _step_sizes(config, deployment, tokens), deployment.attention.tp

    def activations(sizes: Attention) -> int:
        if isinstance(sizes, MLA):
            query = sizes.nope_dim + sizes.rope_dim
            width = latent_width(query, sizes.kv_latent, sizes.rope_dim, sizes.v_dim)
        else:
            width = 3 * sizes.head_dim
        return attention_activations(step, sizes.q_heads, tp, width)

    return max(map(activations, config.attentions()))


def _ffn_activations(config: ModelConfig, deployment: Deployment, tokens: int) -> int:
    """Bytes of a step's activations on an ffn device."""
    mesh, apart = exchange_mesh(deployment), deployment.ffn.shared_ranks

    def widths(spec: FFN) -> FFNWidths:
        if not spec.router:
            return FFNWidths(spec.d_ff, 0, 0, alltoall=False)
        shared = apart and spec.d_ff // spec.expert_d_ff
        return FFNWidths(
            0 if apart else spec.d_ff,
            spec.expert_d_ff,
            max(config.top_k, shared),
            exchange_of(config, deployment) == "alltoall",
            min(config.top_k + (apart > 0), mesh.ranks),
        )

    step, attention = _step_sizes(config, deployment, tokens), deployment.attention
    kinds = {kind.ffn for kind in config.kinds()}
    return ffn_activations(step, mesh, attention.dp, attention.devices, map(widths, kinds))


def memory_of(
    deployment: Deployment, reported: Mapping[Role, int | None] | None = None
) -> dict[Role, int | None]:
    """Returns the bytes that the deployment may use of a device, by role: `memory_gb`, or what the
    devices report if that is less; None if neither is known.

    Args:
      reported: bytes that JAX may use of a device, by role.
    """
    known = reported or {}

    def least(role: Role) -> int | None:
        written = round(getattr(deployment, role).memory_gb * GB)
        return min(filter(None, (written, known.get(role))), default=None)

    return {"attention": least("attention"), "ffn": least("ffn")}


def check_capacity(
    config: ModelConfig, deployment: Deployment, memory: Mapping[Role, int | None]
) -> None:
    """Refuses a deployment that does not fit on its devices; unknown memory is not checked.

    Raises:
      ConfigError: with the arithmetic of every role that does not fit, and what would.
    """
    if all(size is None for size in memory.values()):
        return
    problems = []
    for part in role_bytes(config, deployment):
        available = memory[part.role]
        if available is not None and part.total > available:
            problems.append(_refusal(config, deployment, part, available))
    if problems:
        raise ConfigError("the deployment does not fit:\n  " + "\n  ".join(problems))


def _refusal(config: ModelConfig, deployment: Deployment, part: RoleBytes, available: int) -> str:
    parts = [f"weights {gb_text(part.weights)}"]
    if part.role == "attention":
        parts.append(f"KV pages {gb_text(part.cache)}")
    if part.rings:
        parts.append(f"rings {gb_text(part.rings)}")
    parts.append(f"activations {gb_text(part.activations)}")
    if part.moving:
        parts.append(f"room for moving experts {gb_text(part.moving)}")
    key = f"{part.role}.memory_gb"
    said = key if available == round(getattr(deployment, part.role).memory_gb * GB) else "reported"
    advice = "; ".join(_what_fits(config, deployment, part, available))
    return (
        f"{' + '.join(parts)} = {gb_text(part.total)} GB of {gb_text(available)} GB ({said}) on "
        f"each of the {part.devices} {part.role} device{'s' if part.devices > 1 else ''} "
        f"({shape_of(deployment, part.role)}); "
        + (f"what would fit: {advice}" if advice else "no change of one key makes it fit")
    )


def _what_fits(
    config: ModelConfig, deployment: Deployment, part: RoleBytes, available: int
) -> Iterator[str]:
    """Yields changes of a single key that would make the role fit."""
    if part.cache:
        room = available - part.total + part.cache
        pages = room * deployment.cache.pages // part.cache
        if pages >= -(-deployment.scheduler.max_length // deployment.cache.page_size):
            yield f"cache.pages up to {pages} (now {deployment.cache.pages})"
    for axis in ("ep", "tp") if part.role == "ffn" else ("tp",):
        key, now = f"{part.role}.{axis}", getattr(getattr(deployment, part.role), axis)
        for factor in (2, 4, 8, 16, 32, 64):
            if _fits(config, _changed(deployment, key, now * factor), part.role, available):
                yield f"{key} = {now * factor} ({part.devices * factor} devices)"
                break
    for key, value in _smaller(config, deployment, part):
        if _fits(config, _changed(deployment, key, value), part.role, available):
            yield f"{key} = {value}"


def _smaller(
    config: ModelConfig, deployment: Deployment, part: RoleBytes
) -> Iterator[tuple[str, int | str]]:
    """Yields keys with smaller formats or step sizes to try."""
    for role in [part.role] if deployment.topology.has("ffn") else ["attention", "ffn"]:
        now = getattr(deployment, role).weights
        if not scaled(now) and not scaled(config.stored):
            yield f"{role}.weights", "fp8"
        if role == "ffn" and "int4" not in (now, config.stored):
            yield f"{role}.weights", "int4"
    if part.cache and not scaled(deployment.cache_format):
        yield "cache.format", "fp8"
    yield "scheduler.token_budget", deployment.scheduler.slots


def _changed(deployment: Deployment, key: str, value: int | str) -> Deployment:
    section, name = key.split(".")
    changed = msgspec.structs.replace(getattr(deployment, section), **{name: value})
    return msgspec.structs.replace(deployment, **{section: changed})


def _fits(config: ModelConfig, deployment: Deployment, role: Role, available: int) -> bool:
    try:
        parts = role_bytes(config, deployment)
    except (ConfigError, ValueError):
        return False  # the model cannot be cut like that
    return all(part.total <= available for part in parts if part.role == role)


def shape_of(deployment: Deployment, role: Role) -> str:
    """A role's mesh in words."""
    if role == "attention":
        return f"attention.dp {deployment.attention.dp} x attention.tp {deployment.attention.tp}"
    shared = f" ({deployment.ffn.shared_ranks} shared)" if deployment.ffn.shared_ranks else ""
    return f"ffn.ep {deployment.ffn.ep}{shared} x ffn.tp {deployment.ffn.tp}"


def gb_text(size: int) -> str:
    """Bytes in GB, without the unit."""
    return f"{size / GB:.{2 if size >= GB else 4}f}"
