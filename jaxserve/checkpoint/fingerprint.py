"""Which weights a model folder has: a digest that is cheap enough to be taken at every start.

Two runtimes that compute together, or one after the other for the same request, must have the same
weights, and equal configurations do not say so. Called where workers introduce themselves, and by a
conversion that resumes. Knows neither JAX nor models.
"""

import functools
import hashlib
from pathlib import Path

from jaxserve.checkpoint.manifest import MANIFEST

_SAMPLES, _SAMPLE_BYTES = 64, 4096


def fingerprint(folder: Path) -> str:
    """A digest of a folder's config.json and of the size, header and samples of every weight
    file."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with open(path, "rb") as file:
            digest.update(file.read(int.from_bytes(file.read(8), "little")))
            for sample in range(_SAMPLES):
                file.seek(max(size - _SAMPLE_BYTES, 0) * sample // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def weights_digest(folder: str) -> str:
    """Sixteen hexadecimal digits of a model folder's weights: of a converted one its manifest,
    which has the checksum of every array, otherwise its fingerprint."""
    path = Path(folder)
    files = [*sorted(path.glob("*.safetensors")), path / "config.json", path / MANIFEST]
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
