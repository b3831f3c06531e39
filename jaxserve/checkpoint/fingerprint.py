"""Identifies the weights of a model folder: a digest of every byte, taken at one moment.

Two runtimes that compute together, or one after the other for the same request, must have the same
weights, and equal configurations do not say so. Called where workers introduce themselves, and by a
conversion that resumes. Knows neither JAX nor models.

A process looks at a folder once, before it loads (`revision`). It hashes the files while it loads
and announces that digest for as long as it lives. Checkpoints that it opens later must be the ones
that it looked at, and each read compares its file (`storage/files.py`): a folder that is replaced
meanwhile is an error, never a new name for old weights.
"""

import contextlib
import hashlib
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from jaxserve.errors import CheckpointError
from jaxserve.progress import advanced
from jaxserve.storage.files import LocalFile, open_file, replaced, stamp, write_whole
from jaxserve.storage.mirror import MANIFEST, cache_folder, local_folder, weight_files

_AT_ONCE = threading.Semaphore(4)
"""Tasks started by `begin` that run concurrently."""
_PIECE = 1 << 24
"""Bytes that are hashed between two signs of progress."""
_SETTLED_NS = 2_000_000_000
"""A file may be written twice at the same time of its clock. A hash that was taken sooner after the
file's time is not used again."""


class Revision:
    """The weights of a model folder as they are at this moment.

    Args:
      folder: on this host, or a mirror.

    Attributes:
      model: digest of its config.json.
    """

    def __init__(self, folder: Path):
        manifest, files = folder / MANIFEST, weight_files(folder)
        self._folder = folder
        others = [*folder.glob("*config.json"), *folder.glob("tokenizer*")]
        self._paths = [manifest, *files, *others]
        self._stamp = stamp(*self._paths)
        self.model = model_digest(folder)
        # A manifest has the checksum of every array, and beside it are no such files.
        known = manifest.read_bytes() if manifest.is_file() else self.model.encode()
        self._digest = hashlib.sha256(known)
        self._hashes = [(path.name, begin(file_hash, path)) for path in files]

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits; waits until all files are hashed.

        A converted checkpoint is named by its manifest, a folder in a bucket by the generations of
        its files.

        Raises:
          CheckpointError: a file cannot be read, was replaced meanwhile, or is damaged.
        """
        digest = self._digest.copy()
        for name, found in self._hashes:
            digest.update(f" {name} {found.result()}".encode())
        return digest.hexdigest()[:16]

    def check(self) -> None:
        """Refuses a folder that is not any more the one that was looked at.

        Raises:
          CheckpointError: a file was replaced, or is gone.
        """
        if stamp(*self._paths) != self._stamp:
            raise replaced(self._folder)


def model_digest(folder: Path) -> str:
    """A digest of a model's config.json."""
    config = folder / "config.json"
    text = config.read_bytes() if config.is_file() else b""
    return hashlib.blake2s(text, digest_size=8).hexdigest()


_revisions: dict[Path, Revision] = {}


def revision(folder: str | Path) -> Revision:
    """The weights of a folder as they were when this process first asked."""
    path = local_folder(folder).absolute()
    if path not in _revisions:
        _revisions[path] = Revision(path)
    return _revisions[path]


def check_revision(folder: Path) -> None:
    """Refuses a folder that was replaced since this process first asked for its revision, if it
    did; raises as `Revision.check`."""
    if known := _revisions.get(folder.absolute()):
        known.check()


def forget_revisions() -> None:
    """Lets this process look again: for one that announces nothing and may load another model."""
    _revisions.clear()


def begin[T](work: Callable[[Path], T], path: Path) -> Future[T]:
    """Starts work on a file or folder in the background.

    A process that ends waits for running tasks: the interpreter may abort around a daemon thread
    that is inside native code. Waiting tasks are dropped.
    """
    future: Future[T] = Future()

    def run() -> None:
        with _AT_ONCE:
            try:
                if threading.main_thread().is_alive():
                    future.set_result(work(path))
            except Exception as error:
                future.set_exception(error)

    threading.Thread(target=run, name="jaxserve-hash").start()
    return future


def file_hash(path: Path, *, anew: bool = False) -> str:
    """The SHA-256 of a file, computed once for each version of the file. For a file in a bucket,
    its generation.

    Args:
      anew: read the file even if its hash is known.

    Raises:
      CheckpointError: the file cannot be read, is written to while it is read, or has another hash
        than before, or than the Hub's cache names it by.
    """
    known, note = "", None
    with open_file(path) as file:
        if not isinstance(file, LocalFile):
            return file.generation
        with contextlib.suppress(OSError, CheckpointError):
            key = f"{path.absolute()} {file.version}"
            note = cache_folder("hashes") / hashlib.sha256(key.encode()).hexdigest()
            if note.stat().st_mtime_ns - file.version.mtime_ns > _SETTLED_NS:
                known = note.read_text()
        if known and not anew:
            return known
        whole = hashlib.sha256()
        with open(file.descriptor, "rb", closefd=False) as content:
            while piece := content.read(_PIECE):
                if not threading.main_thread().is_alive():
                    raise CheckpointError(f"{path}: the process ends")
                whole.update(piece)
                advanced()
        found = whole.hexdigest()
    known = next(iter(re.findall("^[0-9a-f]{64}$", path.resolve().name)), known)
    if known not in ("", found):
        raise CheckpointError(f"{path} is damaged: its SHA-256 is {found}, and was {known}")
    with contextlib.suppress(OSError):
        if note is not None:
            write_whole(note, found.encode())
    return found
