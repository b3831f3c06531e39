"""Chooses the number formats of a role's matrices, by the deployment and the checkpoint.

CPUs convert a matrix of floats while they multiply by it, which is exact, and so read half the
bytes (`pallas_kernels/input_major.py`). Beside FP32 activations the matrices of a BF16 checkpoint
stay in BF16, and the tokens are the same. Called by the blocks of both roles and by code that knows
the devices.
"""

from collections.abc import Mapping

import jax.numpy as jnp
import msgspec
from jax.sharding import Mesh

from jaxserve.config.deployment import Deployment
from jaxserve.config.formats import FORMATS, StoredFormat, scaled, sharing
from jaxserve.config.model import MatrixPart, ModelConfig, held_floats, platform_of
from jaxserve.config.topology import Role
from jaxserve.model.module import Formats


def placed(config: ModelConfig, mesh: Mesh) -> ModelConfig:
    """Returns the model with the platform of these devices."""
    return msgspec.structs.replace(config, platform=platform_of(mesh.devices.flat[0].platform))


def weight_format(wanted: str, config: ModelConfig, part: MatrixPart) -> StoredFormat:
    """Returns the weight format of a part of a layer; `auto` is the checkpoint's own format.

    A format keeps the blocks of a checkpoint that stores the same numbers in blocks.
    """
    if wanted == "auto":
        return "plain" if part in config.plain_parts else config.stored
    if not scaled(wanted):
        return "plain"
    kept = sharing(config.stored) and FORMATS[config.stored].dtype == FORMATS[wanted].dtype
    return config.stored if kept else wanted


def role_formats(
    config: ModelConfig, deployment: Deployment, role: Role, shards: Mapping[str, int]
) -> Formats:
    """Returns the number formats of a role's modules; see `held_floats` for those of floats.

    Args:
      shards: see `Formats`.
    """
    weights, on_cpus = getattr(deployment, role).weights, config.platform == "cpu"
    floats = held_floats(role, weights, deployment.dtype, config.floats, on_cpus=on_cpus)
    return Formats(
        jnp.dtype(deployment.dtype),
        weight_format(weights, config, "attention" if role == "attention" else "experts"),
        shards,
        int4=config.int4,
        input_major=on_cpus,
        floats=jnp.dtype(floats),
        float32_norms=config.unit_norms,
        output=deployment.attention.output,
    )
