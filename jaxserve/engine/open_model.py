"""What every runtime of a whole deployment begins with: its model, its meshes, and that it fits."""

from typing import NamedTuple

import jax

from jaxserve.checkpoint.int8_products import read_model, with_int8_products
from jaxserve.checkpoint.source import CheckpointNames
from jaxserve.checkpoint.store import open_folder
from jaxserve.config.deployment import Deployment
from jaxserve.config.model import ModelConfig
from jaxserve.config.topology import Role
from jaxserve.mesh import Submeshes
from jaxserve.model.blocks import ModelTemplates
from jaxserve.model.float_matrices import placed
from jaxserve.roles.compilation import use_compilation_cache
from jaxserve.roles.host_resources import check_memory
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
    else:
        config = with_int8_products(config, deployment)
    meshes = Submeshes(deployment)
    config = placed(config, meshes.ffn)
    check_memory(config, deployment, _local_devices(meshes))
    templates = ModelTemplates(config, deployment, meshes)
    return OpenModel(config, names, meshes, templates, open_source(deployment, names))


def _local_devices(meshes: Submeshes) -> dict[Role, set[jax.Device]]:
    attention = {device for mesh in meshes.domains for device in mesh.local_devices}
    return {"attention": attention, "ffn": set(meshes.ffn.local_devices)}
