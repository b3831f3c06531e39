"""What a converted checkpoint says of itself: `manifest.json`, written last, and the record of a
conversion that is under way.

Written by `convert.py`, read by `hf.read_config` and `store.py`. Knows neither JAX nor models.
"""

import os
import zlib
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from jaxserve.checkpoint.source import CheckpointNames, Sources
from jaxserve.errors import CheckpointError

FORMAT = 2
"""Of the folder; another one is refused."""

MANIFEST = "manifest.json"
CONVERSION = "conversion.json"
"""There while a conversion is under way."""
BLOCKS = "blocks"
"""Folder with one Orbax checkpoint a block, and the record of its leaves as `NAME.json`."""

Stored = Literal["plain", "fp8", "fp8_block", "int8"]


class StoredLeaf(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One array."""

    shape: tuple[int, ...]
    dtype: str
    checksum: str


class BlockRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A block that is written."""

    leaves: dict[str, StoredLeaf]


class Conversion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is converted, and into what; a folder holds the blocks of one."""

    format: int
    source: str
    """Fingerprint of the folder that was converted."""
    weights: Stored
    """Format of the matrices."""
    dtype: str
    """Of what is not quantised."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A complete checkpoint."""

    conversion: Conversion
    config: dict[str, Any]
    """What config.json held."""
    files: dict[str, str]
    """What was copied beside the weights, and each file's SHA-256."""
    blocks: dict[str, dict[str, StoredLeaf]]


class Block(NamedTuple):
    """A part of a model that is stored, and made, at once."""

    name: str
    sources: Sources


def blocks_of(names: CheckpointNames) -> list[Block]:
    """The embedding, the head, and every layer's share of each role."""
    blocks = [Block("embedding", names.embedding), Block("head", names.head)]
    for layer, (attention, ffn) in enumerate(zip(names.attention, names.ffn, strict=True)):
        blocks += [
            Block(f"layers.{layer}.attention", attention),
            Block(f"layers.{layer}.ffn", ffn),
        ]
    return blocks


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a converted checkpoint; None where the folder is none.

    Raises:
      CheckpointError: the conversion never ended, or the manifest is of another format or damaged.
    """
    path = folder / MANIFEST
    if not (folder / BLOCKS).is_dir():
        return None
    if not path.exists():
        if (folder / CONVERSION).exists():
            raise CheckpointError(
                f"{folder}: the conversion is incomplete: no {MANIFEST}; run it again"
            )
        return None
    manifest = read_record(path, Manifest)
    if manifest.conversion.format != FORMAT:
        raise CheckpointError(
            f"{path}: format {manifest.conversion.format}, and this version reads {FORMAT}"
        )
    return manifest


def read_record[Record](path: Path, kind: type[Record]) -> Record:
    """A record that `write_record` wrote.

    Raises:
      CheckpointError: it cannot be read, or is something else.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: damaged: {error}") from None


def write_record(path: Path, record: Any) -> None:
    """Writes a record, all of it or nothing."""
    temporary = path.with_name(path.name + ".new")
    with open(temporary, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


_ROW = 4096
_ROWS_AT_ONCE = 32


def checksum(values: np.ndarray) -> str:
    """A checksum of an array's bytes, at a fifth of what `zlib.crc32` over all of them takes.

    The bytes as little-endian words of 64 bits, in rows of 4096 (zeros fill the last), have a sum a
    row and a sum a column, modulo 2^64; the result is the CRC-32 of the column sums, then that of
    the row sums, in hexadecimal digits. Any changed word, and any two that changed places, show.
    """
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    columns = np.zeros(_ROW, np.uint64)
    of_rows = 0
    step = _ROWS_AT_ONCE * _ROW * 8
    for start in range(0, data.size, step):
        part = data[start : start + step]
        if part.size % (_ROW * 8):
            part = np.concatenate([part, np.zeros(-part.size % (_ROW * 8), np.uint8)])
        rows = part.view("<u8").reshape(-1, _ROW)
        columns += rows.sum(axis=0, dtype=np.uint64)
        of_rows = zlib.crc32(rows.sum(axis=1, dtype=np.uint64).astype("<u8").tobytes(), of_rows)
    return f"{zlib.crc32(columns.astype('<u8').tobytes()):08x}{of_rows:08x}"
