"""Opens weight files by path, whether they lie on disk or in the bucket of a mirrored folder.

Called by the readers of `checkpoint/`, which do not know where a file is. A reader that reopens a
file passes the version that it saw before: bytes of another version are never returned.
"""

import contextlib
import functools
import hashlib
import os
from collections.abc import Buffer, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxserve.errors import CheckpointError
from jaxserve.storage.bucket import ByteSpan, StorageBucket
from jaxserve.storage.mirror import origin_of


class FileVersion(NamedTuple):
    """Version of a file on disk; differs once the file was replaced or written to."""

    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> "FileVersion":
        """The version with this result of `stat`."""
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)


def replaced(name: object) -> CheckpointError:
    """The error for a file that is not the one that this process saw first."""
    return CheckpointError(f"{name} was replaced by another version since this process started")


class LocalFile:
    """A file on disk; `descriptor` may be read at any place by several threads.

    It is not mapped to memory: mapped pages count as the process's memory, and reading past the end
    of a file that shrank would be a signal instead of an error.

    Attributes:
      name: name of the file in errors.
      version: version of the opened file; None: the mirror knows it.
      window: bytes that a reader of whole matrices takes at a time.
      gap: smallest gap in bytes between two wanted parts that is worth a separate read.
      threads: number of reads worth making concurrently.
    """

    window, gap, threads = 1 << 20, 4 << 10, max(2, min(os.cpu_count() or 1, 16))

    def __init__(self, path: Path):
        self.name = str(path)
        try:
            self.descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        self.version = FileVersion.of(os.fstat(self.descriptor))

    def read(self, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes from each start to its stop.

        Raises:
          CheckpointError: the file is shorter, or was replaced.
        """
        parts = []
        for start, stop in spans:
            try:
                data = os.pread(self.descriptor, stop - start, start)
            except OSError as error:
                raise CheckpointError(f"{self.name} cannot be read: {error.strerror}") from None
            if len(data) != stop - start:
                raise CheckpointError(
                    f"{self.name} cannot be read: it ends at byte {start + len(data)}"
                )
            parts.append(data)
        return parts

    def check_end(self, end: int) -> None:
        """Refuses a file that does not end there.

        Raises:
          CheckpointError: it ends elsewhere.
        """
        size = self.version.size
        if size != end:
            raise CheckpointError(f"{self.name} has {size} bytes, and its header says {end}")


class RemoteFile:
    """A file in a bucket, of the version that its mirror has seen; attributes as of `LocalFile`."""

    version = None
    window, gap, threads = 8 << 20, 64 << 10, 32

    def __init__(self, bucket: StorageBucket, name: str, generation: str):
        self.name = f"{bucket.url}/{name}"
        self._bucket, self._key, self.generation = bucket, name, generation

    def read(self, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """See `LocalFile`."""
        asked = [ByteSpan(self._key, start, stop) for start, stop in spans]
        parts = []
        for part, span in zip(self._bucket.read(asked), asked, strict=True):
            if part is None:
                raise CheckpointError(f"{self.name} is gone since this process started")
            if part.generation != self.generation:
                raise replaced(self.name)
            if len(part.data) != (span.stop or 0) - span.start:
                raise CheckpointError(f"{self.name} ends at byte {span.start + len(part.data)}")
            parts.append(part.data)
        return parts

    def check_end(self, end: int) -> None:
        """See `LocalFile`. The size is not known, so the last expected byte is read; bytes after it
        are not detected."""
        self.read([(end - 1, end)])


@contextlib.contextmanager
def open_file(path: Path, version: FileVersion | None = None) -> Iterator[LocalFile | RemoteFile]:
    """Opens a file for the duration of a `with` block.

    Args:
      version: required version of a file on disk; None: any, if it stays the same during the block.
        Versions of files in buckets come from their mirror.

    Raises:
      CheckpointError: it cannot be opened, or was replaced or written to before the block ended.
    """
    origin = origin_of(path.parent)
    if origin is not None and path.name in origin.versions:
        yield RemoteFile(bucket_of(origin.url), path.name, origin.versions[path.name])
        return
    file = LocalFile(path)
    try:
        if version not in (None, file.version):
            raise replaced(path)
        yield file
        # A writer in place would otherwise give its readers parts of both contents.
        if FileVersion.of(os.fstat(file.descriptor)) != file.version:
            raise replaced(path)
    finally:
        os.close(file.descriptor)


def write_whole(path: Path, content: Buffer) -> None:
    """Writes a file that appears whole or not at all, whatever happens to this process, and however
    many processes write it.

    Raises:
      OSError: it cannot be written; nothing is left of it.
    """
    part = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def stamp(*paths: Path) -> str:
    """A digest of the versions of these files and of all files below these folders, on this host.
    Missing files are left out."""
    digest = hashlib.blake2s()
    for path in paths:
        below = [f"{root}/{file}" for root, _, files in os.walk(path) for file in files]
        for name in sorted(below) or [str(path)]:
            with contextlib.suppress(OSError):
                digest.update(f"{name} {FileVersion.of(os.stat(name))}".encode())
    return digest.hexdigest()


@functools.cache
def bucket_of(url: str) -> StorageBucket:
    """The bucket, opened once."""
    return StorageBucket(url)
