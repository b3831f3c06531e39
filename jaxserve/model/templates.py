"""The templates of a whole model, for processes that play both roles or plan for both."""

from jaxserve.config.deployment import Deployment
from jaxserve.config.model import ModelConfig
from jaxserve.mesh import RoleMeshes
from jaxserve.model.blocks import AttentionTemplates
from jaxserve.model.ffn.block import FFNTemplates


class ModelTemplates(AttentionTemplates, FFNTemplates):
    """The templates of every block of a model on a deployment's meshes."""

    def __init__(self, config: ModelConfig, deployment: Deployment, meshes: RoleMeshes):
        AttentionTemplates.__init__(self, config, deployment, meshes)
        FFNTemplates.__init__(self, config, deployment, meshes)
