"""The pipelines that run the steps of one runtime, by name, one file each, and the bytes that they
take on every device.

A process imports the file of its own deployment's pipeline only.
"""

import pkgutil
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxserve.config.deployment import Deployment
from jaxserve.config.model import ModelConfig
from jaxserve.roles.attention_bytes import attention_bytes
from jaxserve.roles.capacity import RoleBytes
from jaxserve.roles.ffn_bytes import ffn_bytes

if TYPE_CHECKING:
    from jaxserve.checkpoint.source import CheckpointNames
    from jaxserve.mesh import Submeshes
    from jaxserve.model.templates import ModelTemplates
    from jaxserve.roles.weights import LeafSource


class OpenModel(NamedTuple):
    """A model opened for this process's devices, before anything large is read."""

    config: ModelConfig
    names: "CheckpointNames"
    meshes: "Submeshes"
    templates: "ModelTemplates"
    source: "LeafSource"


PIPELINES = {
    "colocated": "colocated:ColocatedWorker",
    "layer": "layer_pipeline:build_cell",
    "step": "step_pipeline:build_pipeline",
    "step of both roles": "one_program:BothRolesPipeline",
}
"""File in this folder, and function in it, that builds each pipeline's driver
(`engine.runtime.Driver`) from an open model, its deployment and an observer or None. It loads and
compiles this process's part of every step, and raises ConfigError if the process cannot play it."""


def build(model: OpenModel, deployment: Deployment, observer: Any) -> Any:
    """Builds the driver of a deployment. Colocated mode has a pipeline of its own, and so have
    steps that are one program of both roles."""
    name: str = "layer" if deployment.pipeline == "auto" else deployment.pipeline
    if deployment.topology.has("colocated"):
        name = "colocated"
    elif in_one_program(deployment, model.meshes):
        name = "step of both roles"
    return pkgutil.resolve_name(f"jaxserve.roles.{PIPELINES[name]}")(model, deployment, observer)


def sizes_of(deployment: Deployment, meshes: "Submeshes") -> Any:
    """Returns the function (`capacity.Sizes`) that computes the bytes of the roles' devices."""
    alone = "jaxserve.roles.both_roles:one_program_bytes"
    return pkgutil.resolve_name(alone) if in_one_program(deployment, meshes) else role_bytes


def in_one_program(deployment: Deployment, meshes: "Submeshes") -> bool:
    """Returns whether this process runs the steps of both roles as one program."""
    both = meshes.attention.local_devices and meshes.ffn.local_devices
    return bool(both) and deployment.whole_steps


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
