"""The tensors in a folder's safetensors files: names, dtypes, shapes and byte offsets.

Read by `hf.py` and `hf_config.py`. Knows the file format, but neither models nor JAX. The headers
are parsed here because the safetensors library does not expose byte offsets, which `reading.py`
needs.
"""

import functools
import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, NamedTuple

import ml_dtypes
import msgspec
import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.storage.files import FileVersion, LocalFile, RemoteFile, open_file, stamp
from jaxserve.storage.mirror import weight_files

INDEX = "model.safetensors.index.json"
LARGEST_HEADER = 100_000_000
"""Largest header in bytes; the safetensors library has the same limit."""
_HEADERS_AT_ONCE = 16

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I16": np.dtype(np.int16),
    "U16": np.dtype(np.uint16),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "F32": np.dtype(np.float32),
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
    "F64": np.dtype(np.float64),
}
"""Dtypes by their names in the header."""
READABLE = ("F64", "F32", "F16", "BF16")
"""Dtypes of tensors that need no dequantisation."""
_ITEM_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}


_Size = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]


class _Entry(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A tensor's entry in a header. A msgspec struct, for speed: a model has 100 000 tensors."""

    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


_HEADER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRY = msgspec.json.Decoder(_Entry)


class Tensor(NamedTuple):
    """A tensor in a file."""

    path: Path
    kind: str
    """Dtype, by its safetensors name."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""
    version: FileVersion | None = None
    """Version of the local file whose header was read; None: the file is in a bucket."""

    @property
    def dtype(self) -> np.dtype:
        return DTYPES[self.kind]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.kind]


class Listing(NamedTuple):
    """The tensors of a folder, and the problems of its index."""

    tensors: dict[str, Tensor]
    problems: list[str]
    """Contradictions between the index and the files, and tensors that several files have."""
    lost: set[str]
    """Tensors that the index places in a missing file."""


def list_tensors(folder: Path) -> Listing:
    """Reads the headers of the files that a folder's index names, or of all files without an index.
    The result is cached until a file changes.

    Raises:
      CheckpointError: no file exists, a file is truncated or not in safetensors format, or the
        index is malformed.
    """
    return listed(folder, stamp(folder / INDEX, *weight_files(folder)))


@functools.lru_cache(maxsize=1)
def listed(folder: Path, version: str) -> Listing:
    """Does the work of `list_tensors`; `version` is a cache key that changes with the files."""
    index = _index(folder)
    names = {path.name for path in weight_files(folder)}
    wanted = set(index.values()) if index else names
    gone = wanted - names
    files = sorted(folder / name for name in wanted & names)
    if not files:
        raise CheckpointError(f"{folder}: no .safetensors file")
    tensors: dict[str, Tensor] = {}
    places: dict[str, str] = {}
    problems = [f"{name} is missing, and {INDEX} names it" for name in sorted(gone)]
    broken = []
    for path, found in zip(files, _headers(files), strict=True):
        if isinstance(found, CheckpointError):
            broken.append(str(found))
            continue
        for name in sorted(found.keys() & tensors.keys()):
            problems.append(f"{name} is in {places[name]} and in {path.name}")
        tensors |= found
        places |= dict.fromkeys(found, path.name)
    if broken:
        raise CheckpointError("\n  ".join(broken))
    elsewhere = sorted(name for name, file in index.items() if places.get(name, file) != file)
    problems += [f"{name} is in {places[name]}; {INDEX} says {index[name]}" for name in elsewhere]
    return Listing(tensors, problems, {name for name, file in index.items() if file in gone})


def _index(folder: Path) -> dict[str, str]:
    """Maps tensors to file names, as the index says; empty if the folder has no index."""
    path = folder / INDEX
    if not path.exists():
        return {}
    try:
        tree = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from None
    files = tree.get("weight_map") if isinstance(tree, dict) else None
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{path}: weight_map is not an object that names a file a tensor")
    for name, file in files.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or {"/", "\0"} & {*file}:
            raise CheckpointError(f"{path}: weight_map.{name} = {file!r} is not a file's name")
    return files


def read_header(path: Path) -> dict[str, Tensor]:
    """Reads the header of one file.

    Raises:
      CheckpointError: the file is truncated or malformed: tensors must fill it without gaps or
        overlaps.
    """
    name = str(path)
    try:
        with open_file(path) as file:
            name = file.name
            tensors, end = _entries(path, _header(file), file.version)
            file.check_end(end)
            return tensors
    except (ValueError, RecursionError, CheckpointError) as error:
        raise CheckpointError(f"{name}: truncated or no safetensors: {error}") from None


def _header(file: LocalFile | RemoteFile) -> bytes:
    """The JSON text at the start of a file; ValueError if it would be larger than the largest."""
    (first,) = file.read([(0, 8)])
    length = int.from_bytes(first, "little")
    if length > LARGEST_HEADER:
        raise ValueError(f"a header of {length} bytes")
    (header,) = file.read([(8, 8 + length)])
    return header


def _headers(files: list[Path]) -> Iterator[dict[str, Tensor] | CheckpointError]:
    """Yields each file's tensors, or the error of a broken file. Files are read concurrently,
    because each may take a request to a bucket."""
    with ThreadPoolExecutor(_HEADERS_AT_ONCE, "jaxserve-headers") as pool:
        for read in [pool.submit(read_header, file) for file in files]:
            error = read.exception()
            yield error if isinstance(error, CheckpointError) else read.result()


def _entries(
    path: Path, header: bytes, version: FileVersion | None
) -> tuple[dict[str, Tensor], int]:
    """The tensors of a header, and the byte where the last one ends; ValueError if an entry is
    wrong.

    A repeated name with another place leaves a gap, which is an error. With the same place, the
    last entry counts, as in the safetensors library."""
    tree = _HEADER.decode(header)
    tree.pop("__metadata__", None)
    start = 8 + len(header)
    tensors, places = {}, []
    for name, text in tree.items():
        try:
            entry = _ENTRY.decode(text)
        except msgspec.ValidationError as error:
            raise ValueError(f"{name}: {error}") from None
        kind, shape, (begin, end) = entry.dtype, entry.shape, entry.data_offsets
        if kind not in DTYPES:
            raise ValueError(f"{name}: dtype {kind!r} is not known")
        if end - begin != math.prod(shape) * _ITEM_BYTES[kind]:
            raise ValueError(f"{name}: {kind}{[*shape]} in the bytes {begin} to {end}")
        tensors[name] = Tensor(path, kind, shape, start + begin, version)
        places.append((begin, end, name))
    at = 0
    for begin, end, name in sorted(places):
        if begin != at:
            raise ValueError(f"{name} starts at byte {begin}, and not at {at}")
        at = end
    return tensors, start + at
