"""Arrays of a converted checkpoint: Zarr 3 on disk or in a bucket, read with TensorStore.

Called by `store.py` and `conversion.py`. Knows neither JAX nor models.
"""

import itertools
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  # names of dtypes
import numpy as np
import tensorstore

from jaxserve.checkpoint.manifest import PACKED, Packed
from jaxserve.checkpoint.reading import aligned_empty
from jaxserve.checkpoint.regions import Ranges
from jaxserve.errors import CheckpointError
from jaxserve.storage.bucket import ANSWER_SECONDS, LEAST_BYTES_PER_SECOND, context, kvstore
from jaxserve.storage.files import LocalFile
from jaxserve.storage.mirror import origin_of

# Chunks in flight take memory in addition to the target array, so their number is limited.
_CONTEXT = tensorstore.Context(
    {f"{work}_concurrency": {"limit": LocalFile.threads} for work in ("file_io", "data_copy")}
)


class StoredArray(NamedTuple):
    """An array on disk, whole and unpadded."""

    path: Path
    store: tensorstore.TensorStore
    packed: Packed | None = None
    """Meaning of the bytes of `store`; None: they are numbers of its dtype."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.packed.shape if self.packed else tuple(self.store.shape)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.packed.dtype if self.packed else self.store.dtype.numpy_dtype)

    @property
    def nbytes(self) -> int:
        return self.store.size * self.store.dtype.numpy_dtype.itemsize

    def read_into(self, ranges: Ranges, target: np.ndarray) -> int:
        """See `arrays.ReadableArray`."""
        if self.packed:
            return self._read_packed(ranges, target)
        part = self.store[tuple(slice(low, high) for low, high in ranges)]
        destination = tensorstore.array(target, context=_CONTEXT, copy=False, write=True)
        if part.dtype != destination.dtype:
            part = part.astype(destination.dtype)
        seconds = ANSWER_SECONDS + target.nbytes / LEAST_BYTES_PER_SECOND
        try:
            destination.write(part.translate_to[(0,) * target.ndim]).result(timeout=seconds)
        except TimeoutError:
            raise CheckpointError(f"{self.path}: not read within {seconds:g} s") from None
        except ValueError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}") from None
        return part.size * self.dtype.itemsize

    def _read_packed(self, spans: Ranges, target: np.ndarray) -> int:
        """Reads and unpacks a part. Returns the bytes read."""
        (low, high), each = spans[-1], PACKED[self.dtype.name]
        whole = [*spans[:-1], (low // each, -(-high // each))]
        found: np.ndarray = np.empty([stop - start for start, stop in whole], np.uint8)
        read = self._replace(packed=None).read_into(tuple(whole), found)
        if each == 2:
            both = np.stack([found & 15, found >> 4], axis=-1).reshape(*found.shape[:-1], -1)
            first = low - 2 * whole[-1][0]
            found = both[..., first : first + high - low]
        if self.dtype.kind == "i":
            found = (found ^ np.uint8(8)) - np.uint8(8)  # the sign
        target[...] = found.view(self.dtype).astype(target.dtype)
        return read


def with_parts(own: StoredArray, other: StoredArray, pieces: int, axis: int) -> StoredArray:
    """An array with equal pieces of another array appended as entries of its first axis.

    Args:
      pieces: number of pieces that `other` is divided into.
      axis: axis of `other` along which it is divided; one scale for a whole axis is repeated.

    Raises:
      CheckpointError: the pieces do not have the shape of `own`'s entries.
    """
    size, whole = own.store.shape[1 + axis], other.store.shape[axis]
    if whole != pieces * size and not whole == size == 1:
        raise CheckpointError(
            f"{other.path}: {whole} rows or scales along axis {axis} are not {pieces} x {size}, as "
            f"{own.path} has them"
        )
    starts = [0 if whole == 1 else piece * size for piece in range(pieces)]
    cuts = [other.store[(slice(None),) * axis + (slice(at, at + size),)] for at in starts]
    stacked = tensorstore.stack([cut.translate_to[(0,) * cut.rank] for cut in cuts])
    store = tensorstore.concat([own.store, stacked], axis=0)
    packed = own.packed
    if packed is not None:
        packed = packed._replace(shape=(store.shape[0], *packed.shape[1:]))
    return own._replace(store=store, packed=packed)


class Spread(NamedTuple):
    """Rows and columns of an array, ascending and perhaps repeated: scales for smaller blocks than
    those of the file."""

    array: StoredArray
    rows: np.ndarray
    columns: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.array.shape[:-2], len(self.rows), len(self.columns)

    def read_into(self, ranges: Ranges, target: np.ndarray) -> int:
        """See `arrays.ReadableArray`."""
        rows, columns = self.rows[slice(*ranges[-2])], self.columns[slice(*ranges[-1])]
        ends = [(int(places[0]), int(places[-1]) + 1) for places in (rows, columns)]
        whole = *ranges[:-2], *ends
        part = np.empty([stop - start for start, stop in whole], target.dtype)
        read = self.array.read_into(whole, part)
        target[...] = part[..., (rows - rows[0])[:, None], columns - columns[0]]
        return read


class Dequantised(NamedTuple):
    """A quantised matrix, or a stack of them, as FP32: (values - zero points) times scales."""

    values: StoredArray
    scales: Spread
    """With an entry for each value; so have the zero points."""
    zeros: Spread | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def read_into(self, ranges: Ranges, target: np.ndarray) -> int:
        """See `arrays.ReadableArray`."""
        read, outer = 0, [range(low, high) for low, high in ranges[:-2]]
        for place in itertools.product(*outer):
            part = (*((entry, entry + 1) for entry in place), *ranges[-2:])
            numbers, factors = np.empty((2, *(high - low for low, high in part)), np.float32)
            read += self.values.read_into(part, numbers)
            if self.zeros is not None:
                read += self.zeros.read_into(part, factors)
                numbers -= factors
            read += self.scales.read_into(part, factors)
            numbers *= factors
            at = tuple(entry - own.start for entry, own in zip(place, outer, strict=True))
            target[at] = numbers.reshape(numbers.shape[-2:])
        return read


def open_array(path: Path, packed: Packed | None = None) -> StoredArray:
    """Opens the array in a folder without reading its chunks.

    Args:
      packed: see `StoredArray.packed`.

    Raises:
      CheckpointError: the folder has no readable Zarr 3 array, or none of the bytes of `packed`.
    """
    store = _place(path)
    spec = {
        "driver": "zarr3",
        "kvstore": store,
        # A missing chunk is damage; without this it would read as zeros.
        "fill_missing_data_reads": False,
    }
    remote = store["driver"] != "file"
    if not remote and not (path / "zarr.json").is_file():
        raise CheckpointError(f"{path}: no array: it has no zarr.json")
    shared = context() if remote else _CONTEXT
    opened = tensorstore.open(spec, open=True, read=True, context=shared)
    try:
        array = StoredArray(path, opened.result(timeout=ANSWER_SECONDS))
    except TimeoutError:
        raise CheckpointError(f"{path}: no answer within {ANSWER_SECONDS:g} s") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: no array that can be read: {error}") from None
    found = array.store.dtype.name, tuple(array.store.shape)
    if packed and found != ("uint8", packed.stored):
        name = packed.dtype.upper()
        raise CheckpointError(f"{path} is {found[0]}{list(found[1])}, no {name} {packed.shape}")
    return array._replace(packed=packed)


def _place(path: Path) -> dict[str, Any]:
    """TensorStore's description of where the files of an array are, by its folder's path."""
    for folder in path.parents:
        origin = origin_of(folder)
        if origin is not None:
            return kvstore(f"{origin.url}/{path.relative_to(folder)}")
    return {"driver": "file", "path": str(path.absolute())}


def read_array(array: StoredArray) -> np.ndarray:
    """Reads the whole array.

    Raises:
      CheckpointError: a file is missing or damaged.
    """
    return _part(array, tuple((0, size) for size in array.shape))


def _part(array: StoredArray, ranges: Ranges) -> np.ndarray:
    target = aligned_empty([stop - start for start, stop in ranges], array.dtype)
    array.read_into(ranges, target)
    return target


_ROW = 4096
_STEP_BYTES = 32 * _ROW * 8


def checksum_of(parts: Iterable[np.ndarray]) -> str:
    """Checksum of the bytes of an array, given in consecutive parts. Takes a fifth of the time of
    `zlib.crc32`.

    The bytes are read as little-endian 64-bit words in rows of 4096, zero-padded. The result is the
    CRC-32 of the column sums followed by the CRC-32 of the row sums (sums modulo 2^64), in
    hexadecimal. It detects any changed word and any two swapped words.
    """
    columns, of_rows, rest = np.zeros(_ROW, np.uint64), 0, np.zeros(0, np.uint8)

    def add(data: np.ndarray) -> None:
        nonlocal of_rows
        rows = data.view("<u8").reshape(-1, _ROW)
        np.add(columns, rows.sum(axis=0, dtype=np.uint64), out=columns)
        of_rows = zlib.crc32(rows.sum(axis=1, dtype=np.uint64).astype("<u8").tobytes(), of_rows)

    for values in parts:
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        data = np.concatenate([rest, data]) if rest.size else data
        last = data.size - data.size % (_ROW * 8)
        for start in range(0, last, _STEP_BYTES):
            add(data[start : min(start + _STEP_BYTES, last)])
        rest = data[last:]
    if rest.size:
        add(np.concatenate([rest, np.zeros(-rest.size % (_ROW * 8), np.uint8)]))
    return f"{zlib.crc32(columns.astype('<u8').tobytes()):08x}{of_rows:08x}"


def check_array(array: StoredArray, known: str) -> None:
    """Compares an array with its checksum. A stack of matrices is read one matrix at a time.

    Raises:
      CheckpointError: the array cannot be read, or its checksum differs.
    """
    ranges = tuple((0, size) for size in array.shape)
    stack = array.shape[0] if len(array.shape) > 2 else 0
    parts = [((entry, entry + 1), *ranges[1:]) for entry in range(stack)] or [ranges]
    found = checksum_of(_part(array, part) for part in parts)
    if found != known:
        raise CheckpointError(f"{array.path} has the checksum {found}, and should have {known}")
