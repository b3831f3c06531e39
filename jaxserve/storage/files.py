"""Weight files by their paths: on disk, or behind a mirror's in a bucket.

Called by the readers of `checkpoint/`, which do not know where a file is.
"""

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxserve.errors import CheckpointError
from jaxserve.storage.bucket import Bucket, Span, kvstore
from jaxserve.storage.mirror import origin_of


class StoredFile(Protocol):
    """A file that is open for reading.

    Attributes:
      name: what errors call it.
      remote: whether a read is a request over a network.
    """

    name: str
    remote: bool

    def read(self, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes from each start to its stop.

        Raises:
          CheckpointError: the file is shorter, or was replaced.
        """
        ...

    def check_end(self, end: int) -> None:
        """Refuses a file that does not end there.

        Raises:
          CheckpointError: it ends elsewhere.
        """
        ...


class LocalFile:
    """A file on disk; `descriptor` may be read at any place by several threads."""

    remote = False

    def __init__(self, path: Path):
        self.name = str(path)
        try:
            self.descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None

    def read(self, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """See `StoredFile`."""
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
        """See `StoredFile`."""
        size = os.fstat(self.descriptor).st_size
        if size != end:
            raise CheckpointError(f"{self.name} has {size} bytes, and its header says {end}")

    def close(self) -> None:
        os.close(self.descriptor)


class RemoteFile:
    """A file in a bucket, of the version that its mirror has seen."""

    remote = True

    def __init__(self, bucket: Bucket, name: str, generation: str):
        self.name = f"{bucket.url}/{name}"
        self._bucket, self._key, self._generation = bucket, name, generation

    def read(self, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """See `StoredFile`."""
        asked = [Span(self._key, start, stop) for start, stop in spans]
        parts = []
        for part, span in zip(self._bucket.read(asked), asked, strict=True):
            if part is None or part.generation != self._generation:
                what = "is gone" if part is None else "was replaced by another version"
                raise CheckpointError(f"{self.name} {what} since this process started")
            if len(part.data) != (span.stop or 0) - span.start:
                raise CheckpointError(f"{self.name} ends at byte {span.start + len(part.data)}")
            parts.append(part.data)
        return parts

    def check_end(self, end: int) -> None:
        """See `StoredFile`. Sizes are not told, so its last byte is asked for; what may be behind
        it is not looked at."""
        self.read([(end - 1, end)])


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[LocalFile | RemoteFile]:
    """The file for the time of the block.

    Raises:
      CheckpointError: it cannot be opened.
    """
    origin = origin_of(path.parent)
    if origin is not None and path.name in origin.weights:
        yield RemoteFile(bucket_of(origin.url), path.name, origin.weights[path.name])
        return
    file = LocalFile(path)
    try:
        yield file
    finally:
        file.close()


@functools.cache
def bucket_of(url: str) -> Bucket:
    """The bucket, opened once."""
    return Bucket(url)


def array_store(path: Path) -> dict[str, Any]:
    """TensorStore's description of where the files of an array are, by its folder's path."""
    for folder in path.parents:
        origin = origin_of(folder)
        if origin is not None:
            return kvstore(f"{origin.url}/{path.relative_to(folder)}")
    return {"driver": "file", "path": str(path.absolute())}
