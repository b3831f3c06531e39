"""Models for checks of speed and memory: cut down to some of their layers, with random weights.

Weights of large models take minutes on a host. Devices therefore make these for themselves, each
its own shards, in one program a shape. They have the scale of real ones, and depend on names of
tensors and on positions alone. INT4 comes from `checkpoint/random_leaves.py`.
"""

import functools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from jaxserve.checkpoint.random_leaves import RandomLeaves
from jaxserve.checkpoint.source import CheckpointNames, Sources
from jaxserve.config.deployment import Deployment
from jaxserve.config.model import ModelConfig
from jaxserve.model.module import Template


def first_of_each_kind(
    config: ModelConfig, names: CheckpointNames
) -> tuple[ModelConfig, CheckpointNames]:
    """The model with the first layer of each kind alone."""
    first = {config.layer(layer): layer for layer in reversed(range(config.layers))}
    return only_layers(config, names, sorted(first.values()))


def only_layers(
    config: ModelConfig, names: CheckpointNames, layers: Sequence[int]
) -> tuple[ModelConfig, CheckpointNames]:
    """The model with these layers alone, without prediction modules."""
    kinds = tuple(config.decoder[layer] for layer in layers)
    config = msgspec.structs.replace(config, decoder=kinds, predictors=(), modules=0)
    names = names._replace(
        attention=[names.attention[layer] for layer in layers],
        ffn=[names.ffn[layer] for layer in layers],
        predictions=[],
    )
    return config, names


_LARGEST = {"int8": 127.0, "uint8": 448.0, "float8_e4m3fn": 448.0}
"""Largest magnitude of a quantised value; `uint8` holds the bits of FP8."""


class DeviceLeaves(RandomLeaves):
    """Random weights that devices compute; see the head of this file."""

    def leaves(
        self,
        template: Template,
        sources: Sources | Sequence[Sources],
        shardings: Sequence[jax.sharding.Sharding],
    ) -> list[jax.Array]:
        """Arrays of one block, or of several that are stacked."""
        known = ("float32", "bfloat16", *_LARGEST)
        if any(str(leaf.dtype) not in known for leaf in template.leaves):
            return super().leaves(template, sources, shardings)
        stacked = not isinstance(sources, Mapping)
        blocks = [sources] if isinstance(sources, Mapping) else sources
        shapes = {leaf.name: leaf for leaf in template.leaves}
        arrays = []
        for leaf, sharding in zip(template.leaves, shardings, strict=True):
            matrix = shapes.get(leaf.name.removesuffix("scales") + "values", leaf)
            width = matrix.shape[-2 if matrix.input_major else -1] if matrix.shape else 1
            spread = (3 / width) ** 0.5
            if leaf.name.endswith("scales"):
                form = "constant", spread / _LARGEST[str(matrix.dtype)]
            elif len(leaf.shape) < 2:  # norms and biases
                form = "constant", 0.0 if "bias" in leaf.name else 1.0
            else:
                form = "spread", _LARGEST.get(str(leaf.dtype), spread)
            seeds = np.array([_seed(block, leaf.name) for block in blocks], np.uint32)
            make = _maker(leaf.shape, str(leaf.dtype), *form, stacked, sharding)
            arrays.append(make(seeds))
        return arrays


def open_on_devices(deployment: Deployment, names: CheckpointNames) -> DeviceLeaves:
    """In place of a deployment's own weights, for `build_runtime`."""
    return DeviceLeaves()


def _seed(block: Sources, name: str) -> int:
    names = "".join(tensor for source in block.values() for tensor in source.names)
    return zlib.crc32(f"{name} {names}".encode())


@functools.cache
def _maker(
    shape: tuple[int, ...],
    dtype: str,
    kind: str,
    size: float,
    stacked: bool,
    sharding: jax.sharding.Sharding,
) -> Any:
    def one(seed: jax.Array) -> jax.Array:
        if kind == "constant":
            return jnp.full(shape, size, dtype)
        place = jnp.zeros(shape, jnp.uint32) + seed
        stride = 1
        for axis in reversed(range(len(shape))):
            place += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(stride % 2**32)
            stride *= shape[axis]
        bits = place * np.uint32(2654435769)  # Knuth, and two rounds of MurmurHash3's finaliser
        bits = (bits ^ (bits >> 16)) * np.uint32(0x85EBCA6B)
        bits = (bits ^ (bits >> 13)) * np.uint32(0xC2B2AE35)
        values = (bits >> 8).astype(jnp.float32) * (2 * size / 2**24) - size
        if dtype == "uint8":
            return jax.lax.bitcast_convert_type(values.astype(jnp.float8_e4m3fn), jnp.uint8)
        return values.astype(dtype)

    def block(seeds: jax.Array) -> jax.Array:
        return jax.vmap(one)(seeds) if stacked else one(seeds[0])

    return jax.jit(block, out_shardings=sharding)
