"""Programs of the roles, for a model and a deployment."""

from typing import Any

from jaxserve.checkpoint.families import architecture
from jaxserve.config.deployment import Deployment
from jaxserve.config.model import ModelConfig
from jaxserve.mesh import Submeshes
from jaxserve.model.templates import ModelTemplates
from jaxserve.roles.ffn import FFNPrograms
from tests.jaxserve import layouts

CONFIG = architecture(layouts.SIZES.config())


def programs_of(
    kind: type[Any], deployment: Deployment, config: ModelConfig = CONFIG, meshes: Any = None
) -> Any:
    """The programs of a kind, on the FFN mesh if they are the FFN role's.

    Args:
      meshes: `Submeshes` of this process's devices if None.
    """
    meshes = meshes or Submeshes(deployment)
    mesh = meshes.ffn if kind is FFNPrograms else meshes.attention
    return kind(ModelTemplates(config, deployment, meshes), deployment, mesh)
