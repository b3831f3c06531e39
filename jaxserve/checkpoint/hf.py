"""Hugging Face folders: safetensors, streamed into each role's shards.

`HFCheckpoint` returns leaves: for every device it reads the bytes of that device's shards
(`regions.py`, `reading.py`). Before loading, it checks the whole folder against the tensor names
and shapes that `hf_config.py` derived from the architecture.

FP8 matrices with block scales, 8-bit matrices with a scale per output channel and 4-bit matrices
with a scale per group are delivered as the template asks: unchanged, as the leaves `X.values`,
`X.scales` and optionally `X.zeros`, or dequantised, as the leaf `X`. Matrices that the template
wants quantised, but the files hold as floats or in another of the Hub's formats (`packed.py`), are
quantised on the devices.
"""

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.checkpoint.arrays import (
    FolderReader,
    Leaf,
    block_of,
    fill,
    make_array,
    make_leaves,
    quantised_here,
    read_leaf,
    refuse,
)
from jaxserve.checkpoint.expert_stacks import GROUP, MXFP4, ExpertStack, join_stacks
from jaxserve.checkpoint.fingerprint import check_revision
from jaxserve.checkpoint.packed import PackedTensor, Packing, join_parts
from jaxserve.checkpoint.packed_values import read_packed
from jaxserve.checkpoint.quantization_config import packing_of
from jaxserve.checkpoint.reading import SCALE_BLOCK, SCALES, Region, read_regions
from jaxserve.checkpoint.regions import Ranges, block_scales, source_regions
from jaxserve.checkpoint.source import CheckpointNames, Source, Sources, with_parts
from jaxserve.checkpoint.tensors import READABLE, Listing, Tensor, list_tensors
from jaxserve.errors import CheckpointError
from jaxserve.mesh import sharded_zeros
from jaxserve.model.module import Template
from jaxserve.storage.mirror import local_folder
from pallas_kernels.input_major import in_tiles
from pallas_kernels.quantize import E8M0, QuantArray, dequantize_weight, from_bytes

FP8 = "F8_E4M3"

Tensors = dict[str, Tensor | PackedTensor | ExpertStack]
"""Tensors of a folder by name, each packed matrix or stack joined into one."""


class InMemory(NamedTuple):
    """A small array that was read whole."""

    values: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def read_into(self, ranges: Ranges, target: np.ndarray) -> int:
        """See `ReadableArray`; reads nothing more."""
        target[...] = self.values[tuple(slice(low, high) for low, high in ranges)]
        return 0


class HFCheckpoint(FolderReader):
    """Reads leaves from a folder of safetensors files.

    Args:
      folder: the Hugging Face folder, or its URL.
      names: tensor names and shapes that the architecture expects.

    Raises:
      CheckpointError: files are unreadable or truncated, or tensors are missing, unexpected or
        misshaped; one message lists all problems.
    """

    def __init__(self, folder: str | Path, names: CheckpointNames):
        super().__init__()
        here = local_folder(folder)
        listing = list_tensors(here)
        lost = {*names.renamed(dict.fromkeys(listing.lost))}
        listing = listing._replace(tensors=names.renamed(listing.tensors), lost=lost)
        self.size = sum(tensor.nbytes for tensor in listing.tensors.values())
        self._tensors, problems = _joined(listing, names, _packing(here))
        refuse(folder, problems + _problems(listing, self._tensors, names))
        check_revision(here)

    def kind(self, name: str) -> str:
        """The dtype of a tensor, by its safetensors name."""
        return self._tensors[name].kind

    def block(
        self, template: Template, leaves: dict[str, Leaf], tables: Sequence[Sources]
    ) -> Iterator[jax.Array]:
        """Yields the wanted leaves of one block, or of several stacked blocks."""

        def sources(name: str) -> list[Source]:
            if (part := template.parts.get(name)) is None:
                return [table[name] for table in tables]
            cut = part.pieces, part.axis
            return [with_parts(table[name], table[part.name], *cut) for table in tables]

        def make(name: str, first: Leaf, *others: Leaf) -> Sequence[jax.Array]:
            if not others:
                return [self._plain(sources(name), first)]
            return self._quantised(sources(name), first, *others)

        return make_leaves(leaves, make)

    def _plain(self, sources: Sequence[Source], leaf: Leaf) -> jax.Array:
        """A leaf of floats; quantised matrices are dequantised."""
        if all(self._tensors[name].kind == MXFP4 for s in sources for name in s.all_names):
            return by_layers(leaf, sources, self._decoded)
        return self._array(sources, leaf, self._tensors, [self._grids(s) for s in sources])

    def _quantised(
        self, sources: Sequence[Source], values: Leaf, scales: Leaf, *zeros: Leaf
    ) -> tuple[jax.Array, ...]:
        """Values, scales and (if they have a leaf) zero points of a quantised matrix, as stored in
        the files or quantised on the devices."""
        block = block_of(values.shape, scales.shape)
        tensors = {name: self._tensors[name] for source in sources for name in source.all_names}
        kinds = {tensor.kind for tensor in tensors.values()}
        if values.dtype == jnp.float4_e2m1fn and kinds == {MXFP4}:
            return self._mxfp4(sources, values, scales)
        if values.dtype == jnp.int4 or block == (1, 0):
            if kept := self._kept(sources, tensors, block[1], values, scales, *zeros):
                return kept
        elif kinds == {FP8} and not any(source.reshapes for source in sources):
            grids = [InMemory(block_scales(s, self._grids(s), block)) for s in sources]
            of_scales = read_leaf(grids, scales, self.on_read, empty=1.0)
            return self._array(sources, values, self._tensors), of_scales
        # All other kinds of numbers would lose bits in BF16.
        floats = jnp.bfloat16 if kinds <= {"BF16", MXFP4} else jnp.float32
        return quantised_here((values, scales, *zeros), floats, sources, self._plain)

    def _kept(
        self, sources: Sequence[Source], tensors: Tensors, group: int, *leaves: Leaf
    ) -> tuple[jax.Array, ...]:
        """Values, scales and perhaps zero points of a matrix that the files store as the leaves are
        wanted; empty if they do not."""
        dtype = np.dtype(leaves[0].dtype)
        packed = {n: tensor for n, tensor in tensors.items() if isinstance(tensor, PackedTensor)}
        kept = {n: parts for n, tensor in packed.items() if (parts := tensor.kept(dtype, group))}
        if len(kept) < len(tensors) or any(source.view or source.more for source in sources):
            if kept and dtype == jnp.int4:
                raise CheckpointError(
                    f"{next(iter(packed.values())).path}: {next(iter(tensors))} and others are one "
                    "matrix here, and not all in INT4, or ffn.shared: ranks:n divides them: set "
                    "ffn.weights, or convert the folder first (python -m jaxserve.convert)"
                )
            return ()
        made = []
        for place, leaf in enumerate(leaves):
            read: Tensors = {name: parts[place] for name, parts in kept.items()}
            seen = [s._replace(shapes=tuple(read[n].shape for n in s.names)) for s in sources]
            made.append(self._array(seen, leaf, read, empty=float(place == 1)))
        return tuple(made)

    def _decoded(self, source: Source, leaf: Leaf) -> jax.Array:
        """A leaf of floats of one layer that the files store in MXFP4. All columns of a row are on
        one device until they are decoded, since shares may begin within a group."""
        spec = PartitionSpec(*leaf.sharding.spec[: len(leaf.shape) - 1])
        whole = leaf._replace(sharding=NamedSharding(leaf.sharding.mesh, spec), tile=0)
        grid = *leaf.shape[:-1], -(-leaf.shape[-1] // GROUP)
        parts = whole.of(jnp.float4_e2m1fn), whole._replace(shape=grid).of(E8M0)
        return _decoder(leaf)(*self._mxfp4([source], *parts))

    def _mxfp4(
        self, sources: Sequence[Source], values: Leaf, scales: Leaf
    ) -> tuple[jax.Array, jax.Array]:
        """Values and scales of matrices that the files store in MXFP4, unpacked on the devices."""
        names = {name for source in sources for name in source.all_names}

        def made(leaf: Leaf, part: str, columns: int, size: int, empty: float) -> jax.Array:
            tensors = {name: getattr(self._tensors[name], part) for name in names}
            packed = leaf._replace(shape=(*leaf.shape[:-1], size)).of(jnp.uint8)
            of = [source.per(columns) for source in sources]
            return _unpacker(leaf)(self._array(of, packed, tensors, empty=empty))

        return (
            made(values, "values", 2, values.shape[-1] // 2, 0.0),
            made(scales, "scales", GROUP, scales.shape[-1], 127.0),  # 2^0
        )

    def _array(
        self,
        sources: Sequence[Source],
        leaf: Leaf,
        tensors: Tensors,
        grids: Sequence[dict[str, np.ndarray]] | None = None,
        empty: float = 0.0,
    ) -> jax.Array:
        """Makes a leaf by reading tensors. `tensors` are by the names in the sources, `grids` the
        scales of each source's FP8 blocks (None: no dequantisation), `empty` the value of padding.
        """
        of_blocks = [{} for _ in sources] if grids is None else grids

        def make(parts: list[Ranges]) -> list[np.ndarray]:
            regions, targets = [], [leaf.empty(ranges) for ranges in parts]
            for ranges, target in zip(parts, targets, strict=True):
                own = [
                    region
                    for n, inside, part in leaf.blocks(ranges, target)
                    for region in source_regions(sources[n], tensors, of_blocks[n], inside, part)
                ]
                if sum(region.rows * region.columns for region in own) < target.size:
                    target[...] = empty
                regions += own
            read_regions([r for r in regions if isinstance(r.tensor, Tensor)], self.on_read)
            for region in regions:
                if isinstance(region.tensor, ExpertStack):
                    region.tensor.read(region, self.on_read)
                elif isinstance(region.tensor, PackedTensor):
                    read_packed(region, self.on_read)
            for target in targets if sources[0].plus else ():
                target += sources[0].plus
            return targets

        return make_array(leaf, make, empty=empty)

    def _grids(self, source: Source) -> dict[str, np.ndarray]:
        """FP32 scales of the source's FP8 tensors, by tensor name; read whole because small."""
        grids, regions = {}, []
        for name in source.all_names:
            if self._tensors[name].kind == FP8:
                tensor = self._tensors[name + SCALES]
                assert isinstance(tensor, Tensor)
                grid = grids[name] = np.empty(tensor.shape, np.float32)
                regions.append(Region(tensor, 0, grid.size, 1, grid.size, grid.reshape(1, -1)))
        read_regions(regions, self.on_read)
        return grids


@functools.lru_cache(maxsize=256)
def _decoder(leaf: Leaf) -> Callable[..., jax.Array]:
    """Returns a compiled function that makes a leaf of floats of values and scales."""
    spec = leaf.sharding.spec
    spec = PartitionSpec(*spec, None) if leaf.tile else spec

    def decode(values: jax.Array, scales: jax.Array) -> jax.Array:
        numbers = dequantize_weight(QuantArray(values, scales, (1, GROUP)), leaf.dtype)
        return in_tiles(numbers, leaf.tile) if leaf.tile else numbers

    return jax.jit(decode, out_shardings=NamedSharding(leaf.sharding.mesh, spec))


@functools.lru_cache(maxsize=256)
def _unpacker(leaf: Leaf) -> Callable[[jax.Array], jax.Array]:
    """Returns a compiled function that makes the leaf of its bytes."""
    like = jax.ShapeDtypeStruct(leaf.full_shape, leaf.dtype)
    return jax.jit(lambda packed: from_bytes(packed, like), out_shardings=leaf.sharding)


def _packing(folder: Path) -> Packing | None:
    """How the folder's matrices are packed, by the config.json that `read_config` checked."""
    path = folder / "config.json"
    return packing_of(json.loads(path.read_text())) if path.is_file() else None


def _joined(
    listing: Listing, names: CheckpointNames, packing: Packing | None
) -> tuple[Tensors, list[str]]:
    """The tensors with each packed matrix joined into one, and problems found in their parts."""
    if packing is None:
        return join_stacks(listing.tensors, names)
    matrices = dict(names.unloaded)
    for sources in (names.head, *names.attention, *names.ffn, *names.predictions):
        for source in sources.values():
            matrices |= source.tensors
    joined, problems = join_parts(listing.tensors, matrices, packing)
    return {**joined}, problems


def _problems(listing: Listing, tensors: Tensors, names: CheckpointNames) -> list[str]:
    """Lists tensors that are missing, unexpected or of the wrong shape or dtype."""
    # transformers drops the MTP modules when it saves. If they are not loaded, either all or none
    # of their tensors must be present.
    there = tensors.keys() | listing.lost
    expected = {} if names.unloaded.keys().isdisjoint(there) else dict(names.unloaded)
    problems = list(listing.problems)
    matrices = set()
    blocks = [names.embedding, names.head, *names.attention, *names.ffn, *names.predictions]
    modules = len(names.predictions)
    for place, sources in enumerate(names.predictions):
        if there.isdisjoint(name for source in sources.values() for name in source.names):
            problems.append(
                f"no tensors of prediction module {place + 1} of {modules}, which "
                "speculative.modules asks for; transformers leaves them out when it saves"
            )
            layer = place - modules
            blocks.remove(sources)
            blocks.remove(names.attention[layer])
            blocks.remove(names.ffn[layer])
    for sources in blocks:
        for source in sources.values():
            expected |= source.tensors
            matrices |= set(source.names)
    tables = {n for sources in blocks if (s := sources.get("router.table")) for n in s.names}
    matrices |= names.unloaded.keys()
    known = {**names.optional, **expected}
    stored = [(name, tensors[name]) for name in matrices & tensors.keys()]
    # FP8 matrices have block scales in a tensor of their own.
    blocked = {name for name, own in stored if own.kind == FP8 and len(own.shape) > 1}
    grids = {name + SCALES: _grid_shape(tensors[name].shape) for name in blocked}
    expected |= grids
    known |= grids
    # Older tools saved the frequencies of RoPE, which follow from the configuration.
    present = {
        name
        for name in tensors
        if not name.startswith(names.ignored) and not name.endswith(".rotary_emb.inv_freq")
    }
    missing = expected.keys() - present - listing.lost
    problems += [f"missing {name} {list(expected[name])}" for name in sorted(missing)]
    problems += [f"unexpected {name}" for name in sorted(present - known.keys())]
    wrong, kinds = [], (*READABLE, MXFP4)
    for name in present & known.keys():
        tensor = tensors[name]
        if tensor.shape != known[name]:
            wrong.append(f"{name} is {list(tensor.shape)}, not {list(known[name])}")
        elif isinstance(tensor, PackedTensor) or tensor.kind in kinds or name in blocked:
            continue
        elif (name not in tables or tensor.kind not in ("I32", "I64")) and (
            name not in grids or tensor.kind != "F8_E8M0"
        ):
            wrong.append(f"{name} is {tensor.kind}, not one of {', '.join(READABLE)}")
    return problems + sorted(wrong)


def _grid_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    *first, rows, columns = shape
    return (*first, -(-rows // SCALE_BLOCK), -(-columns // SCALE_BLOCK))


def by_layers[Block](
    leaf: Leaf, blocks: Sequence[Block], make: Callable[[Block, Leaf], jax.Array]
) -> jax.Array:
    """Makes a leaf of one block, or a stack of several, one after the other to save memory."""
    if leaf.layers is None:
        return make(blocks[0], leaf)
    one = leaf.of_one_layer()
    for index, block in enumerate(blocks):
        layer = make(block, one)
        if index == 0:
            assert isinstance(layer.sharding, NamedSharding)
            sharding = NamedSharding(leaf.sharding.mesh, PartitionSpec(None, *layer.sharding.spec))
            stack = sharded_zeros((leaf.layers, *layer.shape), leaf.dtype, sharding)
        stack = jax.block_until_ready(fill(stack, layer, index))
    return stack
