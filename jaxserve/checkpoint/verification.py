"""Verifies the files of a model folder by their checksums (`convert --verify`), and those of a
conversion that is resumed."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from jaxserve.checkpoint.fingerprint import file_hash
from jaxserve.checkpoint.manifest import BLOCKS, MANIFEST, StoredLeaf, read_manifest
from jaxserve.checkpoint.stored_array import check_array, open_array
from jaxserve.errors import CheckpointError
from jaxserve.storage.mirror import local_folder, weight_files


def verify(
    folder: str | Path, *, on_block: Callable[[int, int, str], None] = lambda *_: None
) -> list[str]:
    """Reads a whole folder and returns the problems found. Arrays of a converted checkpoint must
    have their checksums. Other weight files must have the SHA-256 that the Hub's cache names them
    by, or else the SHA-256 that this host recorded first.

    Raises:
      CheckpointError: the folder has no weights.
    """
    folder = local_folder(folder)
    manifest = read_manifest(folder)
    if manifest is None:
        return list(_damaged_files(folder, on_block))
    problems = list(changed(folder, manifest.files))
    for done, (name, record) in enumerate(manifest.blocks.items()):
        problems += damaged(folder, {name: record})
        on_block(done + 1, len(manifest.blocks), name)
    return problems


def _damaged_files(folder: Path, on_block: Callable[[int, int, str], None]) -> Iterator[str]:
    files = weight_files(folder)
    if not files:
        raise CheckpointError(f"{folder}: neither {MANIFEST} nor weight files")
    for done, path in enumerate(files):
        try:
            file_hash(path, anew=True)
        except CheckpointError as error:
            yield str(error)
        on_block(done + 1, len(files), path.name)


def damaged(folder: Path, blocks: Mapping[str, Mapping[str, StoredLeaf]]) -> Iterator[str]:
    """Describes every array that differs from its record."""
    for name, record in blocks.items():
        for leaf, entry in record.items():
            try:
                array = open_array(folder / BLOCKS / name / leaf, entry.packed)
                if array.shape != entry.shape or str(array.dtype) != entry.dtype:
                    yield f"{name}: {leaf} is {array.dtype}{list(array.shape)}"
                else:
                    check_array(array, entry.checksum)
            except CheckpointError as error:
                yield f"{name}: {leaf}: {error}"


def changed(folder: Path, files: dict[str, str]) -> Iterator[str]:
    """Describes every copied file that is missing or was changed."""
    for name, digest in files.items():
        path = folder / name
        if not path.is_file():
            yield f"{name} is missing"
        elif digest_of(path) != digest:
            yield f"{name} was changed"


def digest_of(path: Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
