"""Chooses the dtype of matrices that are not quantised: that of the activations, or BF16 on CPUs.

CPUs convert a matrix while they multiply by it, which is exact, and so read half the bytes
(`pallas_kernels/input_major.py`). Beside FP32 activations the matrices of a BF16 checkpoint stay in
BF16, and the tokens are the same. Called by `blocks.py` and by code that knows the devices.
"""

import jax.numpy as jnp
import msgspec
from jax.sharding import Mesh

from jaxserve.config.deployment import Deployment
from jaxserve.config.model import ModelConfig, held_floats, platform_of
from jaxserve.config.topology import Role


def placed(config: ModelConfig, mesh: Mesh) -> ModelConfig:
    """Returns the model with the platform of these devices."""
    return msgspec.structs.replace(config, platform=platform_of(mesh.devices.flat[0].platform))


def float_dtype(config: ModelConfig, deployment: Deployment, role: Role) -> jnp.dtype:
    """Returns the dtype of a role's matrices that are not quantised; see `held_floats`."""
    weights, on_cpus = getattr(deployment, role).weights, config.platform == "cpu"
    return jnp.dtype(held_floats(role, weights, deployment.dtype, config.floats, on_cpus=on_cpus))
