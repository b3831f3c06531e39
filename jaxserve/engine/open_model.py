"""What every runtime of a whole deployment begins with: its model, its meshes, and that it fits."""

from typing import NamedTuple

import jax

from jaxserve.checkpoint.int8_products import read_model, with_int8_products
from jaxserve.checkpoint.source import CheckpointNames
from jaxserve.checkpoint.store import open_folder
from jaxserve.config.deployment import Deployment
from jaxserve.config.model import ModelConfig
from jaxserve.mesh import Role, Submeshes, memory_limit
from jaxserve.model.blocks import ModelTemplates
from jaxserve.roles.capacity import check_capacity, memory_of
from jaxserve.roles.host_memory import free_host_memory, simulated_memory
from jaxserve.roles.program_cache import use_compilation_cache
from jaxserve.roles.weights import LeafSource, OpenSource
from pallas_kernels.coverage import refuse_fallbacks


class OpenModel(NamedTuple):
    """A model on this process's devices, before anything large is read."""

    config: ModelConfig
    names: CheckpointNames
    meshes: Submeshes
    templates: ModelTemplates
    source: LeafSource


def open_model(
    deployment: Deployment,
    *,
    config: ModelConfig | None = None,
    names: CheckpointNames | None = None,
    open_source: OpenSource = open_folder,
) -> OpenModel:
    """Reads what the model is, and checks that the deployment of it fits here.

    `config` and `names` replace what the model folder says, and `open_source` may replace its
    weights (benches with random ones).

    Raises:
      ConfigError, CheckpointError: before anything large is allocated.
    """
    use_compilation_cache()
    refuse_fallbacks(deployment.strict_kernels)
    if config is None or names is None:
        config, names = read_model(deployment)
    config = with_int8_products(config, deployment)
    meshes = Submeshes(deployment)
    check_capacity(config, deployment, available_memory(config, deployment, meshes))
    templates = ModelTemplates(config, deployment, meshes)
    return OpenModel(config, names, meshes, templates, open_source(deployment, names))


def available_memory(
    config: ModelConfig, deployment: Deployment, meshes: Submeshes
) -> dict[Role, int | None]:
    """Bytes that the deployment may use of a device, by role: what it says, else what devices
    report, of simulated ones their share of the host's free memory."""
    meshes_of: dict[Role, tuple[jax.sharding.Mesh, ...]] = {
        "attention": meshes.domains,
        "ffn": (meshes.ffn,),
    }
    devices = {
        role: {device for mesh in several for device in mesh.local_devices}
        for role, several in meshes_of.items()
    }
    reported: dict[Role, int | None] = {}
    for role, own in devices.items():
        known = [size for device in own if (size := memory_limit(device)) is not None]
        reported[role] = min(known, default=None)
    if jax.default_backend() == "cpu" and all(size is None for size in reported.values()):
        counts = {role: len(own) for role, own in devices.items() if own}
        reported |= simulated_memory(config, deployment, counts, free_host_memory())
    return memory_of(deployment, reported)
