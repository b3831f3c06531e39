"""Computes the bytes that a deployment takes on every device, of both roles."""

from jaxserve.config.deployment import Deployment
from jaxserve.config.model import ModelConfig
from jaxserve.roles.attention_bytes import attention_bytes
from jaxserve.roles.capacity import RoleBytes
from jaxserve.roles.ffn_bytes import ffn_bytes


def role_bytes(config: ModelConfig, deployment: Deployment) -> tuple[RoleBytes, ...]:
    """Returns the bytes on a device of the attention role and of the ffn role; if colocated, on a
    device of the one mesh.

    Additions of the compiler (tiles of an accelerator's memory layout, copies, code) are not
    counted.

    Raises:
      ConfigError: the model cannot be divided over the deployment's meshes.
    """
    (attention,), (ffn,) = attention_bytes(config, deployment), ffn_bytes(config, deployment)
    if not deployment.topology.has("colocated"):
        return attention, ffn
    return (on_one_mesh(attention, ffn),)


def on_one_mesh(attention: RoleBytes, ffn: RoleBytes) -> RoleBytes:
    """Returns the bytes on a device that has both roles."""
    return attention._replace(
        weights=attention.weights + ffn.weights,
        activations=attention.activations + ffn.activations,
        moving=ffn.moving,
    )
