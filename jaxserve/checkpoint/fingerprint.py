"""Which weights a model folder has: a digest that is cheap enough to be taken at every start.

Two runtimes that compute together, or one after the other for the same request, must have the same
weights, and equal configurations do not say so. Called where workers introduce themselves, and by a
conversion that resumes. Knows neither JAX nor models.
"""

import functools
import hashlib
from pathlib import Path

from jaxserve.checkpoint.manifest import MANIFEST
from jaxserve.checkpoint.tensors import header_and_end
from jaxserve.storage.files import open_file
from jaxserve.storage.mirror import local_folder, weight_files

_SAMPLES, _FILE_SAMPLES, _SAMPLE_BYTES = 512, 64, 4096
"""Samples of a folder (two of a file at least), most of a file, and their size: each may be a
request."""


def fingerprint(folder: Path) -> str:
    """A digest of a folder's config.json and of the size, header and samples of every weight
    file."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    files = weight_files(folder)
    samples = min(_FILE_SAMPLES, max(_SAMPLES // max(len(files), 1), 2))
    for path in files:
        with open_file(path) as file:
            header, size = header_and_end(file)
            digest.update(f"{path.name} {size}".encode() + header)
            last = max(size - _SAMPLE_BYTES, 0)
            starts = [last * sample // (samples - 1) for sample in range(samples)]
            for part in file.read([(at, min(at + _SAMPLE_BYTES, size)) for at in starts]):
                digest.update(part)
    return digest.hexdigest()


def weights_digest(folder: str) -> str:
    """Sixteen hexadecimal digits of a model folder's weights: of a converted one its manifest,
    which has the checksum of every array, otherwise its fingerprint."""
    path = local_folder(folder)
    files = [*weight_files(path), path / "config.json", path / MANIFEST]
    found = [(file.name, file.stat()) for file in files if file.is_file()]
    return _digest(path, tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in found))


@functools.lru_cache(maxsize=8)
def _digest(folder: Path, files: tuple[tuple[str, int, int], ...]) -> str:
    """The files are there for the cache: what has changed is read again."""
    if not (folder / "config.json").is_file():
        return "no config.json"
    if (folder / MANIFEST).is_file():
        return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()[:16]
    return fingerprint(folder)[:16]
