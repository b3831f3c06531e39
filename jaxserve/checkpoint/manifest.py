"""Metadata of a converted checkpoint: `manifest.json`, written last, and the record of a conversion
in progress.

Written by `convert.py`, read by `hf_config.py` and `store.py`. Knows neither JAX nor models.
"""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from jaxserve.checkpoint.source import CheckpointNames, Sources
from jaxserve.config.formats import StoredFormat
from jaxserve.config.model import Int4, MatrixPart
from jaxserve.errors import CheckpointError

FORMAT = 2
"""Version of the folder's layout; other versions are refused."""

MANIFEST = "manifest.json"
CONVERSION = "conversion.json"
"""File that exists while a conversion is in progress."""
BLOCKS = "blocks"
"""Folder with one Orbax checkpoint per block, and a record of its leaves in `NAME.json`."""


PACKED = {"int4": 2, "float4_e2m1fn": 2, "float8_e8m0fnu": 1}
"""Dtypes that files hold as bytes, and the neighbours in a byte, low bits first."""


class Packed(NamedTuple):
    """Dtype and shape of an array that files hold as bytes."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def stored(self) -> tuple[int, ...]:
        """Shape of the bytes."""
        *outer, columns = self.shape
        return (*outer, -(-columns // PACKED[self.dtype]))


class StoredLeaf(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shape, dtype and checksum of a stored array."""

    shape: tuple[int, ...]
    dtype: str
    checksum: str

    @property
    def packed(self) -> Packed | None:
        """Dtype and shape of an array that files hold as bytes."""
        return Packed(self.dtype, self.shape) if self.dtype in PACKED else None


class Conversion(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Source and target format of a conversion; a folder holds the blocks of exactly one."""

    format: int
    source: str
    """Fingerprint of the folder that was converted."""
    weights: StoredFormat
    """Format of the matrices."""
    dtype: str
    """Dtype of everything that is not quantised."""
    calibration: str = ""
    """Digest of the text and settings of the calibration; empty: not calibrated."""
    int4: Int4 | None = None
    """Group size and zero points of matrices in 4 bits; None: no matrix has 4."""
    plain_parts: tuple[MatrixPart, ...] = ()
    """Parts of layers whose matrices stay in `dtype` and are not quantised."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Description of a complete converted checkpoint."""

    conversion: Conversion
    config: dict[str, Any]
    """The source's config.json."""
    files: dict[str, str]
    """SHA-256 of every file copied beside the weights, by name."""
    blocks: dict[str, dict[str, StoredLeaf]]


class StoredBlock(NamedTuple):
    """The unit of storage and loading: one role's part of a layer, the embedding, or the head."""

    name: str
    sources: Sources


def blocks_of(names: CheckpointNames) -> list[StoredBlock]:
    """The embedding, the head, the attention and ffn blocks of every layer, and for each loaded
    prediction module its arrays outside of its layer."""
    blocks = [StoredBlock("embedding", names.embedding), StoredBlock("head", names.head)]
    for layer, (attention, ffn) in enumerate(zip(names.attention, names.ffn, strict=True)):
        blocks += [
            StoredBlock(f"layers.{layer}.attention", attention),
            StoredBlock(f"layers.{layer}.ffn", ffn),
        ]
    first = len(names.attention) - len(names.predictions)
    return blocks + [
        StoredBlock(f"layers.{first + index}.prediction", sources)
        for index, sources in enumerate(names.predictions)
    ]


def read_manifest(folder: Path) -> Manifest | None:
    """Reads the manifest of a converted checkpoint; None for other folders.

    Raises:
      CheckpointError: the conversion is incomplete, or the manifest has another version or is
        damaged.
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
    """Reads a record written by `records.write_record`.

    Raises:
      CheckpointError: the file cannot be read, or does not hold a `kind`.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: damaged: {error}") from None
