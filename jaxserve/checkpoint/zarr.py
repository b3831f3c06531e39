"""Arrays of Orbax on disk: Zarr 3, in files of uncompressed chunks, read byte by byte.

Called by `store.py` and `conversion.py`. Knows neither JAX nor models, and of Zarr only what
`conversion.py` has Orbax write; everything else is refused.
"""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

from jaxserve.checkpoint.reading import Region, aligned_empty, read_regions
from jaxserve.checkpoint.regions import Ranges, source_regions
from jaxserve.checkpoint.source import Source
from jaxserve.checkpoint.tensors import DTYPES, Tensor
from jaxserve.errors import CheckpointError

KINDS = {str(dtype): kind for kind, dtype in DTYPES.items()}
"""Names of dtypes in the manifest and in Zarr's metadata, to those of safetensors."""

_CRC_BYTES = 4
"""Of the CRC behind a shard's index."""


class _Codec(msgspec.Struct, frozen=True):
    name: str
    configuration: "_CodecConfiguration | None" = None


class _CodecConfiguration(msgspec.Struct, frozen=True):
    endian: str | None = None
    chunk_shape: tuple[int, ...] = ()
    codecs: list[_Codec] | None = None
    index_codecs: list[_Codec] | None = None
    index_location: str = "end"


class _GridConfiguration(msgspec.Struct, frozen=True):
    chunk_shape: tuple[int, ...]


class _Grid(msgspec.Struct, frozen=True):
    name: str
    configuration: _GridConfiguration


class _Metadata(msgspec.Struct, frozen=True):
    """`zarr.json`: https://zarr-specs.readthedocs.io/en/latest/v3/core/v3.0.html."""

    zarr_format: Literal[3]
    shape: tuple[int, ...]
    data_type: str
    chunk_grid: _Grid
    chunk_key_encoding: dict[str, Any]
    codecs: Annotated[list[_Codec], msgspec.Meta(min_length=1)]


_BYTES = _Codec("bytes", _CodecConfiguration("little"))
_UNCOMPRESSED = ([_BYTES], [_Codec("bytes")])
_INDEX = [_BYTES, _Codec("crc32c")]
_CHUNK_KEYS = (
    {"name": "default"},
    {"name": "default", "configuration": {"separator": "/"}},
)


class StoredArray(NamedTuple):
    """An array on disk: a file a shard, of uncompressed chunks behind each other."""

    path: Path
    kind: str
    shape: tuple[int, ...]
    shard: tuple[int, ...]
    chunk: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.kind].itemsize

    def regions(self, ranges: Ranges, target: np.ndarray) -> Iterator[Region]:
        """What fills a part of the array; nothing is beyond the shape.

        Args:
          target: of the ranges' sizes.
        """
        inside = tuple(
            (low, min(high, n)) for (low, high), n in zip(ranges, self.shape, strict=True)
        )
        for number, own, part in _tiles(inside, self.shard, target):
            path = self.path.joinpath("c", *map(str, number))
            offsets = self._offsets(path)
            for place, corner, piece in _tiles(own, self.chunk, part):
                chunk = {"chunk": Tensor(path, self.kind, self.chunk, int(offsets[place]))}
                whole = Source(("chunk",), (self.chunk,))
                yield from source_regions(whole, chunk, {}, corner, piece)

    def _offsets(self, path: Path) -> np.ndarray:
        """Where in a shard's file each of its chunks starts: an index at its end, of offsets and
        sizes, and a CRC."""
        grid = tuple(-(-n // size) for n, size in zip(self.shard, self.chunk, strict=True))
        length = 16 * math.prod(grid) + _CRC_BYTES
        try:
            with open(path, "rb") as file:
                size = file.seek(0, 2)
                file.seek(max(size - length, 0))
                index = file.read(length - _CRC_BYTES)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        wanted = math.prod(self.chunk) * DTYPES[self.kind].itemsize
        if len(index) != length - _CRC_BYTES:
            raise CheckpointError(f"{path} cannot be read: it is too short for its index")
        entries = np.frombuffer(index, "<u8").reshape(*grid, 2)
        offsets, sizes = entries[..., 0], entries[..., 1]
        if (sizes != wanted).any() or (offsets > size - length - wanted).any():
            raise CheckpointError(f"{path} cannot be read: its index is damaged")
        return offsets


def _tiles(
    ranges: Ranges, tile: tuple[int, ...], target: np.ndarray
) -> Iterator[tuple[tuple[int, ...], Ranges, np.ndarray]]:
    """(number of a tile, ranges in it, their part of the target) of every tile that ranges of an
    array overlap."""
    spans = zip(ranges, tile, strict=True)
    numbers = [range(low // size, -(-high // size)) for (low, high), size in spans]
    for number in itertools.product(*numbers):
        starts = [i * size for i, size in zip(number, tile, strict=True)]
        both = [
            (max(low, start), min(high, start + size))
            for (low, high), start, size in zip(ranges, starts, tile, strict=True)
        ]
        put = tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(both, ranges, strict=True))
        own = tuple((a - start, b - start) for (a, b), start in zip(both, starts, strict=True))
        yield number, own, target[put]


def open_array(path: Path) -> StoredArray:
    """The array in a folder, by its metadata.

    Raises:
      CheckpointError: there is none, or it is stored otherwise than `convert.py` does.
    """
    try:
        metadata = msgspec.json.decode((path / "zarr.json").read_bytes(), type=_Metadata)
    except OSError as error:
        raise CheckpointError(f"{path}: no array: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: metadata that is not understood: {error}") from None
    shard = metadata.chunk_grid.configuration.chunk_shape
    codec, *rest = metadata.codecs
    inner = codec.configuration
    if codec.name != "sharding_indexed" or rest or inner is None or inner.codecs is None:
        raise CheckpointError(f"{path}: not an array of shards of uncompressed chunks")
    chunk = inner.chunk_shape
    known = (
        metadata.data_type in KINDS
        and metadata.chunk_grid.name == "regular"
        and metadata.chunk_key_encoding in _CHUNK_KEYS
        and inner.codecs in _UNCOMPRESSED
        and inner.index_codecs == _INDEX
        and inner.index_location == "end"
        and len(metadata.shape) == len(shard) == len(chunk)
        and all(c > 0 and s % c == 0 for s, c in zip(shard, chunk, strict=True))
    )
    if not known:
        raise CheckpointError(f"{path}: not an array of shards of uncompressed chunks")
    return StoredArray(path, KINDS[metadata.data_type], metadata.shape, shard, chunk)


def read_array(array: StoredArray) -> np.ndarray:
    """All of it."""
    target = aligned_empty(array.shape, DTYPES[array.kind])
    regions = array.regions(tuple((0, size) for size in array.shape), target)
    read_regions(list(regions), lambda size: None)
    return target
