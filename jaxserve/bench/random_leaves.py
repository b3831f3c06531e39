"""Random weights for benches without a checkpoint."""

from collections.abc import Callable, Sequence
from typing import Self

import jax
import numpy as np

from jaxserve.checkpoint.source import CheckpointNames, Sources
from jaxserve.config.deployment import Deployment
from jaxserve.model.module import Template


class RandomLeaves:
    """Random weights, the same on every process, for benches without a checkpoint."""

    size = None

    def __init__(self, seed: int = 0):
        self._seed = seed
        self.on_read: Callable[[int], None] = lambda size: None

    @property
    def storage(self) -> Self:
        """What asks no running worker: itself."""
        return self

    def check(self) -> None:
        """Nothing can be damaged."""

    def leaves(
        self,
        template: Template,
        sources: Sources | Sequence[Sources],
        shardings: Sequence[jax.sharding.Sharding],
    ) -> list[jax.Array]:
        """Normal values of the modules' own scale; those of several blocks are stacked."""
        if isinstance(sources, dict):
            return self._arrays(self._values(template), shardings)
        blocks = [self._values(template) for _ in sources]
        return self._arrays([np.stack(leaf) for leaf in zip(*blocks, strict=True)], shardings)

    def _values(self, template: Template) -> list[np.ndarray]:
        self._seed += 1
        return [np.asarray(value) for value in template.random(self._seed)]

    def _arrays(
        self, values: Sequence[np.ndarray], shardings: Sequence[jax.sharding.Sharding]
    ) -> list[jax.Array]:
        return [
            jax.make_array_from_callback(value.shape, sharding, value.__getitem__)
            for value, sharding in zip(values, shardings, strict=True)
        ]


def open_random(deployment: Deployment, names: CheckpointNames) -> RandomLeaves:
    """In place of a deployment's own weights, for `build_runtime`."""
    return RandomLeaves()
