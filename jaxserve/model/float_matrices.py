"""In which dtype the matrices lie that are not quantised: that of the activations, or on CPUs BF16.

CPUs convert a matrix while they multiply by it, which is exact, and read half the bytes
(`pallas_kernels/input_major.py`): beside FP32 activations a BF16 checkpoint's matrices stay as they
are, and the tokens are the same. Called by `blocks.py` and by whoever knows the devices.
"""

import jax.numpy as jnp
import msgspec
from jax.sharding import Mesh

from jaxserve.config.deployment import Deployment
from jaxserve.config.model import ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.mesh import Role, on_cpus


def placed(config: ModelConfig, mesh: Mesh) -> ModelConfig:
    """The model as these devices run it."""
    return msgspec.structs.replace(config, on_cpus=on_cpus(mesh))


def float_dtype(config: ModelConfig, deployment: Deployment, role: Role) -> jnp.dtype:
    """Of a role's matrices that are not quantised: what `weights` says, else as the files have
    them where that is exact, else the activations'.

    Raises:
      ConfigError: BF16 is asked for beside FP32 activations, and not on CPUs.
    """
    weights = getattr(deployment, role).weights
    if weights == "bfloat16" and deployment.dtype == "float32" and not config.on_cpus:
        raise ConfigError(
            f"{role}.weights = bfloat16 beside dtype = float32: only CPUs convert while they "
            "multiply; elsewhere weights are in dtype, or in 8 or 4 bits"
        )
    stays = weights == "bfloat16" or (weights != "float32" and config.floats == "bfloat16")
    return jnp.dtype("bfloat16" if config.on_cpus and stays else deployment.dtype)
