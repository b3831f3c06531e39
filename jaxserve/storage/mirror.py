"""Copies the small files of a model folder in a bucket to this host's disk, without the weights.

Everything that reads a model's folder calls `local_folder` first. The mirror holds configuration,
tokenizer and manifest as files, and `origin.json` with the place and version of the weights. So a
weight file that is replaced later is an error, and old and new weights never mix.
"""

import fnmatch
import functools
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import msgspec

from jaxserve.errors import CheckpointError
from jaxserve.storage.bucket import ByteSpan, ReadPart, StorageBucket, is_url

ORIGIN = "origin.json"
SCRIPTS = "encoding/encoding_*.py"
"""Pattern of scripts that take the place of a chat template; mirrors have them without a folder."""
SMALL = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "LICENSE*", SCRIPTS)
"""Patterns of the files that are copied. Others are in no folder inside the model's."""
WEIGHTS = "*.safetensors"
MANIFEST = "manifest.json"
"""Manifest of a converted checkpoint; lists all its files except `INT8_PRODUCTS`."""
INT8_PRODUCTS = "int8_products.json"
"""File that lists layers that tolerate attention in INT8; measured after the conversion."""

_HEAD = 8
"""Bytes of a weight file that are read to learn its version."""


class Origin(msgspec.Struct, frozen=True):
    """Where a mirrored folder comes from.

    Attributes:
      url: URL of the folder.
      versions: name → generation: of the weight files, which were not copied, or of the manifest of
        a converted checkpoint.
    """

    url: str
    versions: dict[str, str]


def local_folder(folder: str | Path) -> Path:
    """The folder on this host: `folder` itself, or a mirror of it if it is in a bucket.

    Raises:
      CheckpointError: the bucket cannot be read.
    """
    return _mirrored(folder) if isinstance(folder, str) and is_url(folder) else Path(folder)


@functools.cache
def _mirrored(url: str) -> Path:
    bucket = StorageBucket(url)
    files = _converted(bucket)
    if files is not None:
        seen = {MANIFEST: files[MANIFEST]}
    else:
        names = [n for n in bucket.names() if "/" not in n or fnmatch.fnmatch(n, SCRIPTS)]
        copied = [name for name in names if any(fnmatch.fnmatch(name, p) for p in SMALL)]
        files = _read(bucket, [ByteSpan(name) for name in copied])
        heads = [name for name in names if fnmatch.fnmatch(name, WEIGHTS)]
        seen = _read(bucket, [ByteSpan(name, 0, _HEAD) for name in heads])
        if not names:
            raise CheckpointError(f"no model at {bucket.url}: there is nothing")
    origin = Origin(bucket.url, {name: part.generation for name, part in seen.items()})
    contents = {name: part.data for name, part in files.items()}
    contents[ORIGIN] = msgspec.json.encode(origin)
    return _written(bucket.url, contents, MANIFEST in seen)


def _converted(bucket: StorageBucket) -> dict[str, ReadPart] | None:
    """The small files of a converted checkpoint, as its manifest lists them; None: the folder is
    not converted. Uses no listing, which would return its many chunks."""
    try:
        (manifest,) = bucket.read([ByteSpan(MANIFEST)])
    except CheckpointError:  # without the right to list, a missing file reads as "no permission"
        return None
    if manifest is None:
        return None
    try:
        names = list(msgspec.json.decode(manifest.data)["files"])
    except (msgspec.DecodeError, KeyError, TypeError):  # `read_manifest` reports it
        names = []
    plain = [name for name in names if "/" not in name and not name.startswith(".")]
    found = {MANIFEST: manifest} | _read(bucket, [ByteSpan(name) for name in plain])
    try:
        return found | _read(bucket, [ByteSpan(INT8_PRODUCTS)])
    except CheckpointError:  # as above
        return found


def _read(bucket: StorageBucket, spans: list[ByteSpan]) -> dict[str, ReadPart]:
    """The spans that exist, by name."""
    parts = zip(spans, bucket.read(spans), strict=True)
    return {span.name: part for span, part in parts if part is not None}


def _written(url: str, contents: dict[str, bytes], converted: bool) -> Path:
    """Writes the files to a folder named by their digest; reuses it if it exists already."""
    digest = hashlib.sha256()
    for name, data in sorted(contents.items()):
        digest.update(f"{name} {len(data)} ".encode() + data)
    root = cache_folder("models")
    folder = root / f"{Path(url).name}-{digest.hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    part = Path(tempfile.mkdtemp(prefix=".", dir=root))
    for name, data in contents.items():
        (part / Path(name).name).write_bytes(data)
    if converted:
        (part / "blocks").mkdir()
    try:
        part.rename(folder)
    except OSError:  # another process was first
        shutil.rmtree(part)
        if not folder.is_dir():
            raise CheckpointError(f"{folder} cannot be written") from None
    return folder


def user_cache() -> Path:
    """$XDG_CACHE_HOME, or ~/.cache. The XDG specification ignores relative paths; an empty path
    would be the working directory."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return given if given.is_absolute() else Path.home() / ".cache"


def cache_folder(name: str) -> Path:
    """A writable folder owned by this user: in the cache, or else below /tmp.

    Raises:
      CheckpointError: neither place is writable and ours.
    """
    home = user_cache()
    last = Path(tempfile.gettempdir()) / f"jaxserve-{os.getuid()}"
    for root in (home / "jaxserve" / name, last / name):
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if root.stat().st_uid == os.getuid() and os.access(root, os.W_OK):
            return root
    raise CheckpointError(f"no folder for {name}: {home} and {last} are not ours")


@functools.lru_cache(maxsize=256)
def origin_of(folder: Path) -> Origin | None:
    """The origin of a mirrored folder; None: the folder is no mirror and holds its weights."""
    try:
        return msgspec.json.decode((folder / ORIGIN).read_bytes(), type=Origin)
    except (OSError, msgspec.DecodeError):
        return None


def weight_files(folder: Path) -> list[Path]:
    """Paths of a folder's safetensors files; in a mirror, the files themselves do not exist."""
    origin = origin_of(folder)
    if origin is not None:
        return sorted(folder / name for name in origin.versions if name != MANIFEST)
    return sorted(folder.glob(WEIGHTS))
