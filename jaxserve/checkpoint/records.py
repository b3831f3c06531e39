"""Records and checksums that `convert.py` writes about the arrays of a checkpoint."""

import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from jaxserve.checkpoint.manifest import StoredLeaf
from jaxserve.checkpoint.stored_array import checksum_of

CALIBRATION = "calibration.json"
"""File with the report of a calibration, layer by layer."""


class BlockRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arrays of a block that was written completely."""

    leaves: dict[str, StoredLeaf]


def write_record(path: Path, record: Any) -> None:
    """Writes a record atomically."""
    temporary = path.with_name(path.name + ".new")
    with open(temporary, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def checksum(values: np.ndarray) -> str:
    """The checksum of an array; see `stored_array.checksum_of`."""
    return checksum_of([values])
