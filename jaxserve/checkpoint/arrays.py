"""Assembles sharded JAX arrays: makes every distinct shard on the host once and copies it to the
devices that hold it.

Called by the checkpoints (`hf.py`, `store.py`, `peer.py`), which know how to read a shard.
"""

import abc
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike

from jaxserve.checkpoint.reading import aligned_empty, copy_across
from jaxserve.checkpoint.regions import Ranges, clipped, scale_block
from jaxserve.checkpoint.source import Sources
from jaxserve.errors import CheckpointError
from jaxserve.mesh import sharded_zeros
from jaxserve.model.module import Template
from pallas_kernels.quantize.api import WeightFormat, quantize_weight

QUANTISED_PARTS = ("values", "scales", "zeros")
"""Suffixes of the leaves of a quantised matrix; zero points are optional."""
_PLACES = {part: place for place, part in enumerate(QUANTISED_PARTS)}


class Leaf(NamedTuple):
    """A parameter array to be made, for one block or for several stacked along a new axis."""

    shape: tuple[int, ...]
    """Shape within one block."""
    dtype: jnp.dtype
    sharding: NamedSharding
    """Sharding of the whole array, stacking axis included."""
    layers: int | None = None
    """Length of the stacking axis; None: one block, without such an axis."""
    entries: tuple[int, ...] | None = None
    """For each entry of the block's first axis, the index of its entry in the stored array;
    negative: padding. None: the same entries in the same order."""
    tile: int = 0
    """Output rows per tile of a matrix (or stack of matrices) that devices hold in tiles
    (`InputMajor`); 0: not tiled. Shape and sharding are the checkpoint's; `make_array` reorders. A
    shard consists of whole tiles."""

    @property
    def full_shape(self) -> tuple[int, ...]:
        return self.shape if self.layers is None else (self.layers, *self.shape)

    def of(self, dtype: DTypeLike) -> "Leaf":
        """The leaf with another dtype."""
        return self._replace(dtype=jnp.dtype(dtype))

    def of_one_layer(self) -> "Leaf":
        """The leaf of one layer of this stack."""
        spec = PartitionSpec(*self.sharding.spec[1:])
        return self._replace(sharding=NamedSharding(self.sharding.mesh, spec), layers=None)

    def empty(self, ranges: Ranges) -> np.ndarray:
        """Uninitialised memory for a part of the array, in the checkpoint's order."""
        return aligned_empty([stop - start for start, stop in ranges], np.dtype(self.dtype))

    def blocks(self, ranges: Ranges, shard: np.ndarray) -> Iterator[tuple[int, Ranges, np.ndarray]]:
        """Yields (number of a block, ranges within the block, memory) for each block of a shard."""
        if self.layers is None:
            yield 0, ranges, shard
            return
        for place, block in enumerate(range(*ranges[0])):
            yield block, ranges[1:], shard[place]


def wanted_leaves(
    template: Template, shardings: Sequence[Sharding], layers: int | None
) -> dict[str, Leaf]:
    """The leaves to be made for a template, by name.

    Args:
      shardings: shardings of the template's leaves, in its order.
      layers: number of stacked blocks; None: one block without a stacking axis.
    """
    leaves = {}
    for leaf, sharding in zip(template.leaves, shardings, strict=True):
        assert isinstance(sharding, NamedSharding)
        entries = template.entries.get(leaf.dimensions[0] or "") if leaf.dimensions else None
        shape, tile = leaf.shape, 0
        if leaf.input_major:
            *outer, tiles, d_in, tile = leaf.shape
            shape = (*outer, tiles * tile, d_in)
            axes = len(shape) + (layers is not None)
            sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:axes]))
        leaves[leaf.name] = Leaf(shape, leaf.dtype, sharding, layers, entries, tile)
    return leaves


class ReadableArray(Protocol):
    """An array that is read in parts."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read_into(self, ranges: Ranges, target: np.ndarray) -> int:
        """Copies a part of the array, converted to the target's dtype.

        Args:
          ranges: (start, stop) of every axis, none of them empty, inside the array.
          target: an array with the sizes of the ranges.

        Returns:
          Stored bytes of the part that was read.

        Raises:
          CheckpointError: a file is missing or damaged.
        """


class LeafSource(abc.ABC):
    """Source of a role's leaves: a checkpoint, running workers, or random numbers.

    Attributes:
      on_read: called with the number of bytes of every read, from any thread.
      on_block: called with the number of blocks whose leaves were made.
      checks: pending verifications of the files that were read.
    """

    def __init__(self) -> None:
        self.on_read: Callable[[int], None] = lambda size: None
        self.on_block: Callable[[int], None] = lambda blocks: None
        self.checks: list[Future[None]] = []

    @property
    def storage(self) -> "LeafSource":
        """The source that reads storage, not running workers."""
        return self

    def check(self) -> None:
        """Waits for the verifications; called when everything is loaded.

        Raises:
          CheckpointError: an array is damaged.
        """
        while self.checks:
            self.checks.pop().result()

    @abc.abstractmethod
    def leaves(
        self,
        template: Template,
        sources: Sources | Sequence[Sources],
        shardings: Sequence[Sharding],
    ) -> Iterable[jax.Array]:
        """Makes the leaves of one block, one at a time; each shard is made separately.

        Args:
          sources: the block's sources; or those of several blocks of one kind, whose leaves are
            stacked along a new first axis.
          shardings: shardings of the resulting arrays, stacking axis included.
        """


class BlockReader(LeafSource):
    """Reads the leaves of a checkpoint's blocks; of a folder or of running workers."""

    def leaves(
        self,
        template: Template,
        sources: Sources | Sequence[Sources],
        shardings: Sequence[Sharding],
    ) -> Iterator[jax.Array]:
        """Yields the leaves of one block, or of several; see `LeafSource`."""
        tables, layers = ([sources], None) if isinstance(sources, dict) else (sources, len(sources))
        return self.block(template, wanted_leaves(template, shardings, layers), tables)

    @abc.abstractmethod
    def block(
        self, template: Template, leaves: dict[str, Leaf], tables: Sequence[Sources]
    ) -> Iterator[jax.Array]:
        """Yields the wanted leaves of one block, or of several stacked blocks (one table each)."""


class FolderReader(BlockReader):
    """Reads a model's folder; base class in `hf.py` and `store.py`."""

    size: int
    """Bytes of the tensors or arrays."""


def block_key(sources: Sources) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """A hashable key that identifies a block by its sources."""
    return tuple((leaf, source.names) for leaf, source in sources.items())


def refuse(folder: str | Path, problems: Sequence[str]) -> None:
    """Raises a CheckpointError that lists all problems of a folder, if the list is not empty."""
    if problems:
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        raise CheckpointError(f"{folder}: {count}:\n  " + "\n  ".join(problems))


def matrix_of(leaf: str) -> str:
    """Name of the matrix that a leaf belongs to: `X` for `X.values`, else the leaf's own name."""
    base, _, part = leaf.rpartition(".")
    return base if part in QUANTISED_PARTS else leaf


def make_leaves(
    leaves: Mapping[str, Leaf], make: Callable[..., Sequence[jax.Array]]
) -> Iterator[jax.Array]:
    """Makes the leaves in order, one matrix at a time.

    Args:
      make: called with a name and its one leaf; or with the name of a quantised matrix and its
        leaves for values, scales and, if it has them, zero points.
    """
    for matrix, names in itertools.groupby(leaves, matrix_of):
        own = sorted(names, key=lambda name: _PLACES.get(name.rpartition(".")[2], 0))
        made = dict(zip(own, make(matrix, *(leaves[name] for name in own)), strict=True))
        for name in [name for name in leaves if name in made]:
            yield made.pop(name)


def make_array(
    leaf: Leaf, make: Callable[[list[Ranges]], list[np.ndarray]], *, empty: float = 0.0
) -> jax.Array:
    """Makes the addressable shards of an array.

    Args:
      make: called with the distinct ranges of the shards in the stored array; returns their values
        in memory made by `Leaf.empty`. CPU devices use that memory, so it must not change later.
      empty: value of padding entries (see `Leaf.entries`).
    """
    shape = leaf.full_shape
    ranges: dict[jax.Device, Ranges] = {
        device: tuple(s.indices(n)[:2] for s, n in zip(index or (), shape, strict=True))
        for device, index in leaf.sharding.addressable_devices_indices_map(shape).items()
    }

    def made(parts: Sequence[Ranges]) -> list[np.ndarray]:
        return make([*parts]) if leaf.entries is None else _of_entries(leaf, parts, make, empty)

    unique, sharding = list(dict.fromkeys(ranges.values())), leaf.sharding
    values = _in_tiles(leaf, unique, made) if leaf.tile else made(unique)
    parts = dict(zip(unique, values, strict=True))
    arrays = [jax.device_put(parts[own], device) for device, own in ranges.items()]
    if leaf.tile:
        shape = (*shape[:-2], shape[-2] // leaf.tile, shape[-1], leaf.tile)
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec, None))
    # Without waiting, shards of later leaves would pile up in host memory until copied.
    return jax.block_until_ready(jax.make_array_from_single_device_arrays(shape, sharding, arrays))


def _in_tiles(
    leaf: Leaf, parts: Sequence[Ranges], make: Callable[[list[Ranges]], list[np.ndarray]]
) -> list[np.ndarray]:
    """Values of the parts, cut into tiles and transposed. A stack is made layer by layer: the files
    lie output by output, and one layer more than the result is in memory."""
    shards = []
    for part in parts:
        *outer, rows, columns = (stop - start for start, stop in part)
        shape = (*outer, rows // leaf.tile, columns, leaf.tile)
        shards.append(aligned_empty(shape, np.dtype(leaf.dtype)))
        for block, inside, target in leaf.blocks(part, shards[-1]):
            (values,) = make([part if leaf.layers is None else ((block, block + 1), *inside)])
            across = np.swapaxes(target, -1, -2)
            copy_across(across, values.reshape(across.shape))
    return shards


def read_leaf(
    arrays: Sequence[ReadableArray],
    leaf: Leaf,
    on_read: Callable[[int], None],
    *,
    empty: float = 0.0,
) -> jax.Array:
    """Reads a leaf from one array, or a stack from one array for each layer.

    Args:
      empty: value of padding.
    """

    def make(parts: list[Ranges]) -> list[np.ndarray]:
        shards = []
        for ranges in parts:
            shard = leaf.empty(ranges)
            for block, wanted, target in leaf.blocks(ranges, shard):
                inside = clipped(wanted, arrays[block].shape)
                if inside != wanted:
                    target[...] = empty
                if all(low < high for low, high in inside):
                    place = tuple(slice(high - low) for low, high in inside)
                    on_read(arrays[block].read_into(inside, target[place]))
            shards.append(shard)
        return shards

    return make_array(leaf, make, empty=empty)


def _of_entries(
    leaf: Leaf,
    parts: Sequence[Ranges],
    make: Callable[[list[Ranges]], list[np.ndarray]],
    empty: float,
) -> list[np.ndarray]:
    """Values of the parts, each assembled from runs of consecutive entries of the stored array."""
    assert leaf.entries is not None
    axis = 0 if leaf.layers is None else 1
    runs = [_runs(leaf.entries[slice(*part[axis])]) for part in parts]
    wanted = [
        (*part[:axis], (first, first + length), *part[axis + 1 :])
        for part, own in zip(parts, runs, strict=True)
        for first, length in own
        if first >= 0
    ]
    made = iter(make(wanted))
    values = []
    for part, own in zip(parts, runs, strict=True):
        if len(own) == 1 and own[0][0] >= 0:
            values.append(next(made))
            continue
        target = leaf.empty(part)
        moved, at = np.moveaxis(target, axis, 0), 0
        for first, length in own:
            moved[at : at + length] = np.moveaxis(next(made), axis, 0) if first >= 0 else empty
            at += length
        values.append(target)
    return values


def _runs(entries: Sequence[int]) -> list[tuple[int, int]]:
    """(first, length) of each run of consecutive entries; a negative first marks padding."""
    runs: list[tuple[int, int]] = []
    for entry in entries:
        first, length = runs[-1] if runs else (0, 0)
        joins = first < 0 if entry < 0 else first >= 0 and entry == first + length
        if length and joins:
            runs[-1] = first, length + 1
        else:
            runs.append((max(entry, -1), 1))
    return runs


def block_of(values: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, int]:
    """(block_out, block_in) that share a scale, from the shapes of values and scales; 0: the whole
    axis.

    Raises:
      CheckpointError: no block size explains both shapes.
    """
    (d_out, d_in), (rows, columns) = values[-2:], scales[-2:]
    if columns == 1 and rows == d_out:
        return 1, 0
    try:
        return scale_block(d_out, rows), scale_block(d_in, columns)
    except CheckpointError as error:
        raise CheckpointError(f"values {values}, scales {scales}: {error}") from None


@functools.lru_cache(maxsize=256)
def quantiser(values: Leaf, scales: Leaf) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    """Compiles a function that quantises a whole matrix on the devices to values and scales."""
    block = block_of(values.shape, scales.shape)
    kinds: dict[str, WeightFormat] = {"int8": "int8", "int4": "int4", "float4_e2m1fn": "mxfp4"}
    kind = kinds.get(values.dtype.name, "fp8" if block == (1, 0) else "fp8_block")

    def quantise(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
        quantised = quantize_weight(matrix, kind, block)
        return quantised.values, quantised.scales

    return jax.jit(quantise, out_shardings=(values.sharding, scales.sharding))


def quantised_here[Block](
    leaves: Sequence[Leaf],
    floats: DTypeLike,
    blocks: Sequence[Block],
    plain: Callable[[Sequence[Block], Leaf], jax.Array],
) -> tuple[jax.Array, ...]:
    """Quantises a matrix on the devices. A stack is quantised layer by layer, so that at most one
    layer exists as floats.

    Args:
      leaves: leaves for values and scales, and optionally for zero points, which become 0.
      floats: dtype of the matrix before quantisation.
      blocks: the block of the matrix, or the blocks of the stack.
      plain: makes the float matrix of one block.
    """
    values, scales = (leaf._replace(entries=None) for leaf in leaves[:2])
    others = tuple(map(zeroed, leaves[2:]))
    wanted = leaves[0].of(floats)
    if values.layers is None:
        return *quantiser(values, scales)(plain(blocks, wanted)), *others
    quantise = quantiser(values.of_one_layer(), scales.of_one_layer())
    of_values, of_scales = zeroed(values), zeroed(scales)
    for index, block in enumerate(blocks):
        layer = quantise(plain([block], wanted.of_one_layer()))
        of_values, of_scales = fill(of_values, layer[0], index), fill(of_scales, layer[1], index)
        jax.block_until_ready((of_values, of_scales))
    return of_values, of_scales, *others


def zeroed(leaf: Leaf) -> jax.Array:
    """An array of zeros for this leaf; `fill` writes its layers."""
    return sharded_zeros(leaf.full_shape, leaf.dtype, leaf.sharding)


@functools.partial(jax.jit, donate_argnums=0)
def fill(stack: jax.Array, layer: jax.Array, index: int | jax.Array) -> jax.Array:
    """Writes one layer into the stack, which is donated."""
    return stack.at[index].set(layer)
