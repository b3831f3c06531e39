"""Hugging Face folders: config.json and safetensors, streamed into each role's shards.

`read_config` reads the architecture, `HFCheckpoint` hands out leaves: for every device it reads the
slices that this device owns, straight from the memory-mapped files. The whole folder is checked
against the architecture before the first byte is loaded. Knows families only through their table.

A file is mapped anew for every tensor: pages that were read count as memory of the process for as
long as they are mapped, so that one lasting map would hold the checkpoint a second time.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxserve.checkpoint.families import FAMILIES, CheckpointNames, Source, Sources
from jaxserve.config.model import ModelConfig
from jaxserve.errors import CheckpointError
from jaxserve.module import Template

READABLE = ("F64", "F32", "F16", "BF16")
"""Types of tensors that are taken as they are. The others mean nothing without their scales."""


def read_config(folder: str | Path) -> tuple[ModelConfig, CheckpointNames]:
    """The architecture in a folder's config.json, and its tensors' names.

    Raises:
      CheckpointError: no such folder or file, not JSON, a family that is not known, or entries
        that are missing or of a wrong type (all of them).
    """
    path = Path(folder) / "config.json"
    try:
        tree = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(f"no model at {folder}: {path.name}: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path}: not an object but {type(tree).__name__}")
    model_type = tree.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise CheckpointError(
            f"{path}: model_type {model_type!r} is not known; known: {', '.join(FAMILIES)}"
        )
    family = FAMILIES[model_type]
    try:
        config = family.config(tree)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    return config, family.names(config)


class _Tensor(NamedTuple):
    """A tensor in a file."""

    path: Path
    shape: tuple[int, ...]
    dtype: str


class HFCheckpoint:
    """The tensors of a folder's files.

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
        self._tensors = self._list()
        self._check(names)

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return sum(path.stat().st_size for path in self._folder.glob("*.safetensors"))

    def _list(self) -> dict[str, _Tensor]:
        """Every tensor of every file, by name."""
        paths = sorted(self._folder.glob("*.safetensors"))
        if not paths:
            raise CheckpointError(f"{self._folder}: no .safetensors file")
        tensors: dict[str, _Tensor] = {}
        for path in paths:
            try:
                with safe_open(path, "np") as file:
                    for name in file.keys():  # noqa: SIM118  (no mapping)
                        part = file.get_slice(name)
                        tensors[name] = _Tensor(path, tuple(part.get_shape()), part.get_dtype())
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: truncated or no safetensors: {error}") from None
        return tensors

    def _check(self, names: CheckpointNames) -> None:
        expected = dict(names.unloaded)
        for sources in (names.embedding, names.head, *names.attention, *names.ffn):
            for source in sources.values():
                expected |= dict(zip(source.names, source.shapes, strict=True))
        known = names.optional | expected
        present = {n for n in self._tensors if not n.startswith(names.ignored)}
        problems = [
            f"missing {name} {list(expected[name])}" for name in sorted(expected.keys() - present)
        ]
        problems += [f"unexpected {name}" for name in sorted(present - known.keys())]
        for name in sorted(present & known.keys()):
            tensor = self._tensors[name]
            if tensor.shape != known[name]:
                problems.append(f"{name} is {list(tensor.shape)}, not {list(known[name])}")
            elif tensor.dtype not in READABLE:
                problems.append(f"{name} is {tensor.dtype}, not one of {', '.join(READABLE)}")
        if problems:
            count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
            raise CheckpointError(f"{self._folder}: {count}:\n  " + "\n  ".join(problems))

    def leaves(
        self,
        template: Template,
        sources: Sources,
        shardings: Sequence[jax.sharding.Sharding],
    ) -> Iterator[jax.Array]:
        """The leaves of one block, one after another, each device's slices read for itself."""
        for name, leaf, sharding in zip(template.names, template.leaves, shardings, strict=True):
            yield self._leaf(sources[name], leaf, sharding)

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
            values = self._slice(name, tuple(where))
            if source.transpose:
                values = np.swapaxes(values, -1, -2)
            target = [
                slice(low - r, high - r) for (low, high), (r, _) in zip(wanted, ranges, strict=True)
            ]
            target[-1] = slice(low + offset - ranges[-1][0], high + offset - ranges[-1][0])
            part[tuple(target)] = values
        return part

    def _slice(self, name: str, where: tuple[slice, ...]) -> np.ndarray:
        """A part of a tensor, copied out of its file."""
        path = self._tensors[name].path
        try:
            with safe_open(path, "np") as file:
                values: np.ndarray = file.get_slice(name)[where]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: {name} cannot be read: {error}") from None
        self.on_read(values.nbytes)
        return values
