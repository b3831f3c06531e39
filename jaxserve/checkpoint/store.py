"""Converted checkpoints: one Orbax checkpoint per block of the model, restored into any layout.

`convert.py` writes them. Arrays are stored unsharded and unpadded: each device's part is read from
the chunks that it overlaps (`stored_array.py`), and the padding that a layout adds is zero.
Checksums cover whole arrays. They are verified in the background of loading, unless the folder is
in a bucket or each of several processes reads only a part. Then only `convert --verify` verifies
them.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np

from jaxserve.checkpoint.arrays import (
    QUANTISED_PARTS,
    FolderReader,
    Leaf,
    ReadableArray,
    block_key,
    block_of,
    make_leaves,
    matrix_of,
    quantised_here,
    read_leaf,
    refuse,
)
from jaxserve.checkpoint.fingerprint import begin, check_revision
from jaxserve.checkpoint.manifest import (
    BLOCKS,
    MANIFEST,
    Manifest,
    StoredLeaf,
    blocks_of,
    read_manifest,
)
from jaxserve.checkpoint.source import CheckpointNames, Sources
from jaxserve.checkpoint.stored_array import (
    Dequantised,
    Packed,
    Spread,
    StoredArray,
    check_array,
    open_array,
    with_parts,
)
from jaxserve.errors import CheckpointError
from jaxserve.model.module import Template
from jaxserve.storage.files import open_file, replaced, stamp
from jaxserve.storage.mirror import local_folder, origin_of

_OPENED_AT_ONCE = 16
"""Arrays opened concurrently; opening may take a request to a bucket."""


class StoreCheckpoint(FolderReader):
    """Reads leaves from a converted checkpoint.

    Args:
      folder: a folder written by `convert.py`, or its URL.
      names: tensor names that the architecture expects.

    Raises:
      CheckpointError: the manifest is missing; or blocks, leaves or arrays are missing, unexpected,
        or differ from the manifest in shape or dtype (one message lists all problems).
    """

    def __init__(self, folder: str | Path, names: CheckpointNames):
        here = local_folder(folder)
        super().__init__()
        before, manifest = stamp(here / MANIFEST), read_manifest(here)
        if manifest is None:
            raise CheckpointError(f"{folder}: no {MANIFEST}: not a converted checkpoint")
        self._arrays, problems = open_blocks(here, manifest, names)
        refuse(folder, problems)
        self.size = sum(a.nbytes for block in self._arrays.values() for a in block.values())
        self._blocks = {block_key(block.sources): block.name for block in blocks_of(names)}
        self._folder, self._manifest = here, manifest
        self._stamps = {name: self._stamp(name) for name in self._arrays}
        # Each process of a larger runtime reads parts of arrays, but checksums cover whole arrays.
        whole = jax.process_count() == 1 and origin_of(here) is None
        self._unverified = set(self._arrays if whole else ())
        if stamp(here / MANIFEST) != before:
            raise replaced(folder)
        check_revision(here)

    def _verify(self, block: Path) -> None:
        for leaf, known in self._manifest.blocks[block.name].items():
            check_array(self._arrays[block.name][leaf], known.checksum)

    def _stamp(self, block: str) -> str:
        """The version of a block's files on this host."""
        return stamp(self._folder / MANIFEST, self._folder / BLOCKS / block)

    def block(
        self, template: Template, leaves: dict[str, Leaf], tables: Sequence[Sources]
    ) -> Iterator[jax.Array]:
        """Yields the wanted leaves of one block, or of several stacked blocks."""
        names = [self._blocks[block_key(sources)] for sources in tables]
        for name in self._unverified & set(names):
            self._unverified.remove(name)
            self.checks.append(begin(self._verify, self._folder / BLOCKS / name))
        blocks = [_with_parts(self._arrays[name], template) for name in names]

        def make(name: str, first: Leaf, *others: Leaf) -> Sequence[jax.Array]:
            if not others:
                return [self._plain(blocks, name, first)]
            return self._quantised(blocks, name, first, *others)

        yield from make_leaves(leaves, make)
        with open_file(self._folder / MANIFEST) as manifest:
            manifest.read([(0, 1)])  # in a bucket, another version is refused here
        for name in names:
            if self._stamp(name) != self._stamps[name]:
                raise replaced(f"{self._folder}: {name}")

    def _plain(self, blocks: Sequence[dict[str, StoredArray]], name: str, leaf: Leaf) -> jax.Array:
        """A leaf of floats; quantised matrices are dequantised."""
        return read_leaf([_floats_of(block, name) for block in blocks], leaf, self.on_read)

    def _quantised(
        self,
        blocks: Sequence[dict[str, StoredArray]],
        name: str,
        values: Leaf,
        scales: Leaf,
        *zeros: Leaf,
    ) -> tuple[jax.Array, ...]:
        """Values, scales and (if they have a leaf) zero points of a quantised matrix, as stored or
        quantised on the devices."""
        floats = np.dtype(np.float32)
        if f"{name}.values" in blocks[0]:
            of_values = [block[f"{name}.values"] for block in blocks]
            of_scales = [block[f"{name}.scales"] for block in blocks]
            places = _scale_places(of_values[0], of_scales[0], values, scales)
            if places is not None and of_values[0].dtype == values.dtype:
                made = [read_leaf(of_values, values, self.on_read)]
                for kind, leaf, empty in [("scales", scales, 1), *(("zeros", z, 0) for z in zeros)]:
                    spread = [Spread(block[f"{name}.{kind}"], *places) for block in blocks]
                    made.append(read_leaf(spread, leaf, self.on_read, empty=empty))
                return tuple(made)
        else:
            floats = blocks[0][name].dtype
        return quantised_here(
            (values, scales, *zeros),
            floats,
            blocks,
            lambda some, leaf: self._plain(some, name, leaf),
        )


def _with_parts(block: dict[str, StoredArray], template: Template) -> dict[str, StoredArray]:
    """The block's arrays by leaf, with pieces of other matrices where the template appends them."""
    arrays = dict(block)
    for name, array in block.items():
        base = matrix_of(name)
        if part := template.parts.get(base):
            other = block[part.name + name.removeprefix(base)]
            arrays[name] = with_parts(array, other, part.pieces, part.axis)
    return arrays


def _floats_of(block: dict[str, StoredArray], name: str) -> ReadableArray:
    """A block's matrix or vector as floats."""
    if name in block:
        return block[name]
    values, *grids = (part for kind in QUANTISED_PARTS if (part := block.get(f"{name}.{kind}")))
    sizes = zip(block_of(values.shape, grids[0].shape), values.shape[-2:], strict=True)
    places = [np.arange(size) // (each or size) for each, size in sizes]
    return Dequantised(values, *(Spread(grid, *places) for grid in grids))


def _scale_places(
    values: StoredArray, scales: StoredArray, wanted: Leaf, wanted_scales: Leaf
) -> tuple[np.ndarray, np.ndarray] | None:
    """Row and column indices of the stored scales for the wanted blocks; None if a wanted block
    spans several stored blocks."""
    places = []
    sizes = zip(
        block_of(values.shape, scales.shape),
        block_of(wanted.shape, wanted_scales.shape),
        values.shape[-2:],
        strict=True,
    )
    for stored, block, size in sizes:
        stored, block = stored or size, block or max(size, 1)
        first = np.arange(-(-size // block)) * block
        last = np.minimum(first + block, size) - 1
        if (first // stored != last // stored).any():
            return None
        places.append(first // stored)
    return places[0], places[1]


def open_blocks(
    folder: Path, manifest: Manifest, names: CheckpointNames
) -> tuple[dict[str, dict[str, StoredArray]], list[str]]:
    """Opens every array; returns them by block and leaf, and the problems found."""
    arrays: dict[str, dict[str, StoredArray]] = {}
    problems = []
    expected = {block.name: block.sources.keys() for block in blocks_of(names)}
    unloaded = tuple(f"layers.{layer}." for layer in names.unloaded_layers)
    there = {name for name in manifest.blocks if not name.startswith(unloaded)}
    problems += [f"missing block {name}" for name in sorted(expected.keys() - there)]
    problems += [f"unexpected block {name}" for name in sorted(there - expected.keys())]
    if len(names.predictions) and not any(name.endswith(".prediction") for name in there):
        problems.append("it was converted without the prediction modules; convert it again")
    known = expected.keys() & manifest.blocks.keys()
    with ThreadPoolExecutor(_OPENED_AT_ONCE, "jaxserve-open") as pool:
        places = [(name, leaf) for name in known for leaf in manifest.blocks[name]]
        paths = [folder / BLOCKS / name / leaf for name, leaf in places]
        packed = [manifest.blocks[name][leaf].packed for name, leaf in places]
        found = dict(zip(places, pool.map(_opened, paths, packed), strict=True))
    for name in known:
        stored = manifest.blocks[name]
        arrays[name] = {}
        bases = set(map(matrix_of, stored))
        for base in sorted(expected[name] - bases):
            problems.append(f"missing {name}: {base}")
        for base in sorted(bases - expected[name]):
            problems.append(f"unexpected {name}: {base}")
        for leaf, entry in stored.items():
            array = found[name, leaf]
            if isinstance(array, CheckpointError):
                problems.append(str(array))
                continue
            arrays[name][leaf] = array
            problems += _differences(f"{name}: {leaf}", array, entry)
    return arrays, problems


def _opened(path: Path, packed: Packed | None) -> StoredArray | CheckpointError:
    try:
        return open_array(path, packed)
    except CheckpointError as error:
        return error


def _differences(name: str, array: StoredArray, entry: StoredLeaf) -> list[str]:
    is_, says = (
        f"{kind} {list(shape)}"
        for kind, shape in ((str(array.dtype), array.shape), (entry.dtype, entry.shape))
    )
    return [f"{name} is {is_}, and the manifest says {says}"] if is_ != says else []
