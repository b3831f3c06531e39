"""Random weights in place of a checkpoint's. Used by `bench/`, `preflight/` and tests."""

import zlib
from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx

from jaxserve.checkpoint.arrays import LeafSource
from jaxserve.checkpoint.source import CheckpointNames, Sources
from jaxserve.config.deployment import Deployment
from jaxserve.model.module import Template

SEEDS = 1 << 30


class RandomLeaves(LeafSource):
    """Random weights that depend on a seed and on the names of a block's tensors alone: all
    processes and layouts of a model have the same."""

    def __init__(self, seed: int = 0):
        super().__init__()
        self._seed = seed

    def leaves(
        self,
        template: Template,
        sources: Sources | Sequence[Sources],
        shardings: Sequence[jax.sharding.Sharding],
    ) -> list[jax.Array]:
        """Normal values of the modules' own scale; those of several blocks are stacked."""
        if isinstance(sources, dict):
            return self._arrays(self._values(template, sources), shardings)
        blocks = [self._values(template, block) for block in sources]
        return self._arrays([np.stack(leaf) for leaf in zip(*blocks, strict=True)], shardings)

    def _values(self, template: Template, sources: Sources) -> list[np.ndarray]:
        names = "".join(name for source in sources.values() for name in source.names)
        seed = self._seed + zlib.crc32(names.encode()) % SEEDS
        return [np.asarray(value) for value in random_leaves(template, seed)]

    def _arrays(
        self, values: Sequence[np.ndarray], shardings: Sequence[jax.sharding.Sharding]
    ) -> list[jax.Array]:
        return [
            jax.make_array_from_callback(value.shape, sharding, value.__getitem__)
            for value, sharding in zip(values, shardings, strict=True)
        ]


def random_leaves(template: Template, seed: int) -> list[jax.Array]:
    """Makes random leaves. Copies of one entry of the checkpoint, such as replicas, are equal."""
    leaves = []
    made = jax.tree.leaves(nnx.state(template.build(nnx.Rngs(seed))))
    for leaf, value in zip(template.leaves, made, strict=True):
        own = template.entries.get(leaf.dimensions[0] or "") if template.parts else None
        same = own and np.array([own.index(entry) for entry in own])
        leaves.append(value if same is None else value[same])
    return leaves


def open_random(deployment: Deployment, names: CheckpointNames) -> RandomLeaves:
    """Opens random weights in place of a deployment's own, for `build_runtime`."""
    return RandomLeaves()
