"""An ffn worker that shares the ffn role with others (`ffn.instances` over `pull`).

Each of them, a shard, has some of the experts. The first one has the shared experts, too, and dense
layers take turns. Attention sends a message to all shards and adds up their answers
(`shard_links.py`). A shard is the ffn worker of a smaller model, on its own part of the role's
ranks, and knows nothing of the others.
"""

import functools
from typing import Any

from msgspec.structs import replace

from jaxserve.checkpoint.source import CheckpointNames
from jaxserve.config.deployment import Deployment
from jaxserve.config.model import LayerKind, ModelConfig
from jaxserve.config.topology import Role
from jaxserve.errors import ConfigError
from jaxserve.fleet.role_runtime import RoleRuntime
from jaxserve.link.dispatch.contract import Contract, experts_of
from jaxserve.model.ffn.block import FFNTemplates
from jaxserve.model.module import Template


def shard_of(
    config: ModelConfig, deployment: Deployment, number: int
) -> tuple[ModelConfig, Deployment]:
    """Returns model and deployment of a shard. It answers with zeros in dense layers that are not
    its own.

    Raises:
      ConfigError: the model has fewer experts than there are shards, or weights should come from
        other workers, of which not all have the same.
    """
    role, key = deployment.ffn, f"ffn.instances = {deployment.ffn.instances}"
    if 0 < config.experts < role.instances:
        raise ConfigError(f"{key}: the model has {config.experts} routed experts")
    if deployment.weights.peers or deployment.weights.address:
        raise ConfigError(
            f"{key}: over pull an ffn worker has its weights from storage, not from weights.peers, "
            "and hands none out (weights.address)"
        )
    own = len(experts_of(config.experts, role.instances, number))

    def part(layer: int, kind: LayerKind) -> LayerKind:
        ffn, router = kind.ffn, kind.ffn.router
        turn = 0 if router else layer % role.instances
        d_ff = ffn.d_ff if number == turn else 0
        router = router and replace(router, experts=own)
        return kind._replace(ffn=replace(ffn, router=router, d_ff=d_ff))

    decoder = tuple(part(*one) for one in enumerate(config.decoder))
    predictors = tuple(part(*one) for one in enumerate(config.predictors, config.layers))
    shared = role.shared if number == 0 else "split"
    ffn = replace(role, ep=role.ep // role.instances, instances=1, shared=shared)
    return replace(config, decoder=decoder, predictors=predictors), replace(deployment, ffn=ffn)


def runtime_of(
    worker: int, config: ModelConfig, names: CheckpointNames, deployment: Deployment, role: Role
) -> RoleRuntime:
    """Makes the runtime of a shard, as `RoleRuntime.of` does of others.

    Args:
      worker: place of the ffn worker in `link.addresses`: shards take turns.
    """
    shards, number = deployment.ffn.instances, worker % deployment.ffn.instances
    own, of_shard = shard_of(config, deployment, number)
    return RoleRuntime.of(own, names, of_shard, role)._replace(
        contract=Contract.of(config, deployment),
        instance=number,
        templates=functools.partial(ShardTemplates, experts_of(config.experts, shards, number)),
    )


class ShardTemplates(FFNTemplates):
    """Templates of the ffn role's blocks with some of the checkpoint's experts.

    Args:
      experts: these experts, which the model numbers from 0.
    """

    def __init__(self, experts: range, *of: Any):
        super().__init__(*of)
        self.first_expert = experts.start
        for template in self.ffn.values():
            self._number(template)

    def of_experts(self, experts: tuple[int, ...]) -> Template:
        """See `FFNTemplates`."""
        return self._number(super().of_experts(experts))

    def _number(self, template: Template) -> Template:
        """Numbers the entries of slots as in the checkpoint; negative: none."""
        first, own = self.first_expert, template.entries["expert_slots"]
        template.entries = {"expert_slots": tuple(one + first if one >= 0 else one for one in own)}
        return template
