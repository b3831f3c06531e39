"""AFD with random weights and one bucket: what `host.py` and `overlap.py` measure on.

No checkpoint, no engine, no control plane: programs, weights and a driver, the same in every
process that calls it.
"""

from typing import Any, NamedTuple

from jaxserve.checkpoint.step3 import step3_names
from jaxserve.config.deployment import Deployment, load_deployment
from jaxserve.config.model import ModelConfig
from jaxserve.engine.build import use_compilation_cache
from jaxserve.mesh import Submeshes
from jaxserve.model import ModelTemplates
from jaxserve.pipeline.driver import AFDDriver
from jaxserve.pipeline.executables import AFDExecutables, afd_executables
from jaxserve.pipeline.plan import FROM_DEVICE, Bucket, SequenceRow, StepPlan
from jaxserve.pipeline.weights import AFDWeights, RandomLeaves
from jaxserve.programs import AFDPrograms


class RandomModel(NamedTuple):
    """A deployment of a random model, compiled and loaded."""

    deployment: Deployment
    config: ModelConfig
    programs: AFDPrograms
    bucket: Bucket
    executables: AFDExecutables
    weights: AFDWeights

    def driver(self, executables: AFDExecutables | None = None) -> AFDDriver:
        """A driver over these programs, or over others in their place."""
        bound = {self.bucket: executables or self.executables}
        return AFDDriver(self.programs, bound, self.weights)

    def decode_plan(self, lane: int, number: int, kv_length: int) -> StepPlan:
        """A decode step with every slot taken; all tokens come from the device.

        The sequences of all lanes use the same pages: nobody reads the text.
        """
        page_size = self.deployment.cache.page_size
        pages = -(-kv_length // page_size)
        rows = [
            SequenceRow(
                slot=slot,
                token_ids=[FROM_DEVICE],
                kv_length=kv_length,
                page_ids=list(range(slot * pages, (slot + 1) * pages)),
                sample=True,
            )
            for slot in range(self.programs.slots)
        ]
        return StepPlan(lane, number, self.bucket, [rows])


def deployment_of(*, slots: int, max_length: int, page_size: int, **overrides: Any) -> Deployment:
    """FP32, one bucket of one token a slot, and pages for every sequence of one lane."""
    pages = -(-max_length // page_size)
    return load_deployment(
        ".",
        {
            "dtype": "float32",
            "cache.page_size": page_size,
            "cache.pages": slots * pages,
            "scheduler.slots": slots,
            "scheduler.max_length": max_length,
            "scheduler.token_budget": slots,
            "scheduler.token_buckets": [slots],
            "scheduler.page_buckets": [pages],
            **overrides,
        },
    )


def bucket_of(deployment: Deployment) -> Bucket:
    """The one bucket."""
    limits = deployment.scheduler
    return Bucket(limits.token_buckets[0], limits.page_buckets[0])


def afd_programs(deployment: Deployment, config: ModelConfig) -> AFDPrograms:
    """The programs, not compiled."""
    meshes = Submeshes(deployment)
    return AFDPrograms(ModelTemplates(config, deployment, meshes), deployment, meshes)


def build(deployment: Deployment, config: ModelConfig) -> RandomModel:
    """Compiles and fills it, on the devices that this process has."""
    use_compilation_cache()
    programs, bucket = afd_programs(deployment, config), bucket_of(deployment)
    compiled = afd_executables(programs, [bucket], deployment.link.transport)
    weights = AFDWeights(RandomLeaves(), step3_names(config), programs)
    return RandomModel(deployment, config, programs, bucket, compiled[bucket], weights)
