"""KV pages in a bucket (`cache.storage: gs://…`, `s3://…`), found by all workers that may read it.

An object is what a file is in `disk_pages.py`. A bucket does not tell when an object was last used,
so none is deleted for room: that is left to the bucket's own rules. Requests have a short deadline:
a page that comes late is of no use.
"""

import time

from jaxserve.engine.disk_pages import READ_SECONDS, DiskPages
from jaxserve.errors import CheckpointError
from jaxserve.storage.bucket import ByteSpan, StorageBucket

PAUSE_SECONDS = 30.0
"""Pages are not written for this long after one could not be: they would wait one behind the other,
also at the end of the process."""


class BucketPages(DiskPages):
    """The pages below a URL that may be used here.

    Args:
      folder: its URL; there is nothing but pages below it.
      limit: not kept.
      identity, counters: see `DiskPages`.

    Raises:
      CheckpointError: the bucket cannot be listed.
    """

    readers, list_seconds = 16, 30.0

    def __init__(self, folder: str, limit: int, identity: str, counters: dict[str, float]):
        self._bucket, self._paused = StorageBucket(folder, READ_SECONDS), 0.0
        super().__init__(folder, 1 << 62, identity, counters)

    def _scan(self) -> list[tuple[int, str, int]]:
        return [(0, name, 0) for name in self._bucket.names()]

    def _bytes(self, file: str) -> bytes:
        (part,) = self._bucket.read([ByteSpan(file)])
        if part is None:
            raise FileNotFoundError(file)
        return part.data

    def _write(self, file: str, data: bytes) -> None:
        if time.monotonic() < self._paused:
            raise CheckpointError(f"nothing is written for {PAUSE_SECONDS:g} s")
        self._paused = time.monotonic() + PAUSE_SECONDS
        self._bucket.write(file, data)
        self._paused = 0.0

    def _touch(self, file: str) -> None:
        if file not in self._names:
            raise FileNotFoundError(file)

    def _delete(self, file: str) -> None:
        self._bucket.write(file, None)
