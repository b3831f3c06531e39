"""A model's folder, opened as the workers of a deployment open it."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from jaxserve.checkpoint.hf_config import read_config
from jaxserve.checkpoint.opening import open_checkpoint
from jaxserve.checkpoint.source import Source
from jaxserve.mesh import Submeshes
from jaxserve.model.templates import ModelTemplates
from jaxserve.roles.attention_programs import AttentionWeights, LayerPrograms
from jaxserve.roles.colocated import ColocatedPrograms, ColocatedWeights
from jaxserve.roles.ffn import FFNPrograms, FFNWeights
from pallas_kernels.quantize.api import QuantArray
from tests.jaxserve import layouts


class Opened:
    """The architecture and the templates of a folder in one deployment.

    Args:
      modules: multi-token-prediction modules to load.
      on_cpus: whether float matrices are kept in tiles, as CPUs have them.
      source: gives the weights; the folder itself if there is none.
    """

    def __init__(
        self,
        folder: Path | str,
        overrides: Mapping[str, Any] | None = None,
        *,
        modules: int = 0,
        on_cpus: bool = False,
        source: Any = None,
    ):
        self.deployment = layouts.deployment(folder, dict(overrides or {}))
        config, self.names = read_config(folder, modules=modules)
        self.config = msgspec.structs.replace(config, platform="cpu" if on_cpus else "tpu")
        self.meshes = Submeshes(self.deployment)
        self.templates = ModelTemplates(self.config, self.deployment, self.meshes)
        self.source = source or open_checkpoint(folder, self.names)

    def ffn(self) -> FFNWeights:
        """The weights of the FFN role."""
        programs = FFNPrograms(self.templates, self.deployment, self.meshes.ffn)
        return FFNWeights(self.source, self.names, programs)

    def weights(self) -> list[Any]:
        """The weights of the deployment's roles: one object colocated, else two."""
        given = self.templates, self.deployment, self.meshes.attention
        if self.deployment.mode == "colocated":
            return [ColocatedWeights(self.source, self.names, ColocatedPrograms(*given))]
        attention = AttentionWeights(self.source, self.names, LayerPrograms(*given))
        return [attention, self.ffn()]

    def leaves(self) -> list[jax.Array]:
        """All arrays: embedding, head, layers, prediction modules."""
        return leaves_of(self.weights())

    def blocks(self) -> Iterator[tuple[int, Any, dict[str, jax.Array]]]:
        """(layer, template, {leaf: array}) of the attention and the FFN of every layer."""
        attention, ffn = self.weights()
        for layer in range(self.config.layers):
            kind = self.config.layer(layer)
            for template, leaves in (
                (self.templates.attention[kind], attention.layers[layer]),
                (self.templates.ffn[kind.ffn], ffn.blocks[layer]),
            ):
                yield layer, template, dict(zip(template.names, leaves, strict=True))

    def quantised(self) -> Iterator[tuple[int, str, QuantArray]]:
        """(layer, leaf, matrix) of every quantised matrix."""
        for layer, template, leaves in self.blocks():
            for name, matrix in matrices(template, leaves):
                yield layer, name, matrix

    def head(self) -> Iterator[jax.Array]:
        """The head's leaves on the first device, read when they are asked for."""
        return self.on_one_device(self.templates.head, self.names.head)

    def on_one_device(self, template: Any, sources: Any) -> Iterator[jax.Array]:
        """A block's leaves on the first device."""
        one = NamedSharding(Mesh(jax.devices()[:1], ("x",)), PartitionSpec())
        return self.source.leaves(template, sources, [one] * len(template.leaves))


def edit_config(folder: Path, **entries: Any) -> None:
    """Changes entries of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


@contextlib.contextmanager
def changed(folder: Path, file: str = "model.safetensors") -> Iterator[dict[str, np.ndarray]]:
    """Gives the tensors of a file, and writes what the block has made of them."""
    tensors = load_file(folder / file)
    yield tensors
    save_file(tensors, folder / file)


def matrices(template: Any, leaves: Mapping[str, jax.Array]) -> Iterator[tuple[str, QuantArray]]:
    """Every quantised matrix of a block."""
    block = template.merge([leaves[name] for name in template.names])
    for name in leaves:
        if name.endswith(".values"):
            part = block
            for attribute in name.split(".")[:-1]:
                part = getattr(part, attribute)
            yield name.removesuffix(".values"), part[...]


def leaf_of(source: Source, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    """A leaf of a module, by definition, from the tensors of a checkpoint."""
    parts = []
    for name in source.names:
        part = tensors[name]
        if source.view is not None:
            view = source.view
            part = part.reshape(view.shape).take(range(view.start, view.stop), view.axis)
        parts.append(part)
    axis = max(parts[0].ndim - 2, 0)
    return np.stack(parts) if source.stacked else np.concatenate(parts, axis)


def bits(leaf: Any) -> np.ndarray:
    """The bytes of an array, [..., bytes of a row]."""
    return np.asarray(leaf).view(np.uint8)


def check_same(expected: list[jax.Array], found: list[jax.Array]) -> None:
    """Compares arrays: their dtypes, on which devices they lie, and every bit."""
    for one, other in zip(expected, found, strict=True):
        assert (one.dtype, one.sharding) == (other.dtype, other.sharding)
        np.testing.assert_array_equal(bits(one), bits(other))


def leaves_of(weights: list[Any]) -> list[jax.Array]:
    """All arrays of the weights that `Opened.weights` gives."""
    if len(weights) == 1:
        return [*weights[0].flat, *weights[0].modules]
    attention, ffn = weights
    outer = (attention.embedding, attention.head)
    blocks = (*outer, *attention.layers, *ffn.blocks, *attention.predictions)
    return [leaf for block in blocks for leaf in block]
