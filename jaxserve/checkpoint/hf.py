"""Hugging Face folders: config.json and safetensors, streamed into each role's shards.

`model_config` reads the architecture, `HFCheckpoint` hands out leaves: for every device it reads
the slices that this device owns, straight from the memory-mapped files. The whole folder is checked
against the architecture before the first byte is loaded. Knows families only through their table.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxserve.checkpoint.families import FAMILIES, CheckpointNames, Source, Sources
from jaxserve.config.model import ModelConfig
from jaxserve.errors import CheckpointError
from jaxserve.module import Template


def read_config(folder: str | Path) -> tuple[ModelConfig, CheckpointNames]:
    """The architecture in a folder's config.json, and its tensors' names.

    Raises:
      CheckpointError: no such folder or file, not JSON, or a family that is not known.
    """
    path = Path(folder) / "config.json"
    try:
        tree = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(f"no model at {folder}: {path.name}: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from None
    model_type = tree.get("model_type") if isinstance(tree, dict) else None
    if model_type not in FAMILIES:
        raise CheckpointError(
            f"{path}: model_type {model_type!r} is not known; known: {', '.join(FAMILIES)}"
        )
    family = FAMILIES[model_type]
    config = family.config(tree)
    return config, family.names(config)


class HFCheckpoint:
    """The open files of a folder.

    Args:
      folder: the Hugging Face folder.
      names: what the architecture expects.

    Attributes:
      on_read: called with a number of bytes whenever so many were read.

    Raises:
      CheckpointError: unreadable or truncated files; missing, unexpected and misshaped tensors,
        all of them in one message.
    """

    def __init__(self, folder: str | Path, names: CheckpointNames):
        self._folder = Path(folder)
        self.on_read: Callable[[int], None] = lambda size: None
        self._files = self._open()
        self._check(names)

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return sum(path.stat().st_size for path in self._folder.glob("*.safetensors"))

    def _open(self) -> dict[str, Any]:
        """Tensor name → open file."""
        paths = sorted(self._folder.glob("*.safetensors"))
        if not paths:
            raise CheckpointError(f"{self._folder}: no .safetensors file")
        files: dict[str, Any] = {}
        for path in paths:
            try:
                file = safe_open(path, "np")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: truncated or no safetensors: {error}") from None
            files |= dict.fromkeys(file.keys(), file)
        return files

    def _check(self, names: CheckpointNames) -> None:
        expected = dict(names.unloaded)
        for sources in (names.embedding, names.head, *names.attention, *names.ffn):
            for source in sources.values():
                expected |= dict(zip(source.names, source.shapes, strict=True))
        present = {n for n in self._files if not n.startswith(names.ignored)}
        problems = [
            f"missing {name} {list(expected[name])}" for name in sorted(expected.keys() - present)
        ]
        problems += [f"unexpected {name}" for name in sorted(present - expected.keys())]
        for name in sorted(present & expected.keys()):
            shape = tuple(self._files[name].get_slice(name).get_shape())
            if shape != expected[name]:
                problems.append(f"{name} is {list(shape)}, not {list(expected[name])}")
        if problems:
            raise CheckpointError(
                f"{self._folder}: {len(problems)} problems:\n  " + "\n  ".join(problems)
            )

    def leaves(
        self,
        template: Template,
        sources: Sources,
        shardings: Sequence[jax.sharding.Sharding],
    ) -> list[jax.Array]:
        """The leaves of one block, each device's slices read for itself."""
        return [
            self._leaf(sources[name], leaf, sharding)
            for name, leaf, sharding in zip(template.names, template.leaves, shardings, strict=True)
        ]

    def _leaf(
        self, source: Source, leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding
    ) -> jax.Array:
        def read(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            ranges = [s.indices(size)[:2] for s, size in zip(index, leaf.shape, strict=True)]
            return self._read(source, ranges, leaf.dtype)

        return jax.make_array_from_callback(leaf.shape, sharding, read)

    def _read(self, source: Source, ranges: list[tuple[int, int]], dtype: jnp.dtype) -> np.ndarray:
        """One device's part of a leaf; what lies beyond the file's tensors is padding, zero."""
        part = np.zeros([stop - start for start, stop in ranges], dtype)
        start = 0
        for name, shape in zip(source.names, source.shapes, strict=True):
            seen = (*shape[:-2], shape[-1], shape[-2]) if source.transpose else shape
            offset, start = start, start + seen[-1]
            wanted = [
                (low, min(high, size)) for (low, high), size in zip(ranges, seen, strict=True)
            ]
            low, high = max(ranges[-1][0] - offset, 0), min(ranges[-1][1] - offset, seen[-1])
            wanted[-1] = (low, high)
            if any(low >= high for low, high in wanted):
                continue
            where = [slice(low, high) for low, high in wanted]
            if source.transpose:
                where[-2:] = where[-1], where[-2]
            values = self._files[name].get_slice(name)[tuple(where)]
            self.on_read(values.nbytes)
            if source.transpose:
                values = np.swapaxes(values, -1, -2)
            target = [
                slice(low - r, high - r) for (low, high), (r, _) in zip(wanted, ranges, strict=True)
            ]
            target[-1] = slice(low + offset - ranges[-1][0], high + offset - ranges[-1][0])
            part[tuple(target)] = values
        return part
