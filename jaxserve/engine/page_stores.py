"""Stores of KV pages below the device: host memory, and a folder or bucket (`cache.storage`).

`page_tier.py` asks on the engine's thread. Pages in host memory (`HostPages`) are found by keys;
this is the bookkeeping, which copies nothing: another thread fills `HostPage.rows` in.

A file of a folder holds one page. Its name says what the page's entries depend on: the model's
weights and formats, the salt, and all tokens up to the page's last one. So a page is found again
after a restart, and by every worker that has the folder. Files appear whole (`write_whole`) and
begin with a checksum of their name and content; a file whose checksum is wrong is deleted. Workers
need no lock: two that write the same page write the same bytes, and a file may vanish at any time.
The engine's thread touches no file: it sees a set of names. One thread here writes, lists and
deletes. A few read, and their callers wait for a limited time.

An object in a bucket (`BucketPages`) is what a file is in a folder, for all workers that may read
it. A bucket does not tell when an object was last used, so none is deleted for room: that is left
to the bucket's own rules. Requests have a short deadline: a page that comes late is of no use.
"""

import contextlib
import hashlib
import logging
import os
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.roles.page_programs import PagePrograms
from jaxserve.storage.bucket import ByteSpan, StorageBucket
from jaxserve.storage.files import write_whole


class PageName(NamedTuple):
    """Name of a page: what its KV entries depend on."""

    key: bytes
    """Digest of the salt and of all tokens up to the page's last one."""
    root: bytes
    """Digest of the salt and the first page's tokens, common to everything that continues it."""
    ring: bool = False
    """True if its ring page belongs to it: the entries of layers with a window, or the state behind
    the page."""

    @property
    def with_ring(self) -> "PageName":
        """Name of the same page together with its ring page."""
        key = hashlib.blake2b(self.key, digest_size=24).digest()
        return self._replace(key=key, ring=True)


def page_names(
    salt: bytes, keys: Iterable[bytes], before: PageName | None = None
) -> list[PageName]:
    """Returns the names of successive pages.

    Args:
      salt: of the sequence; see `PageKeys`.
      keys: the pages' tokens, as in `PageKeys`.
      before: name of the page before the first key; None: the pages begin the sequence.
    """
    names = []
    for key in keys:
        above = before.key if before else hashlib.blake2b(salt, digest_size=24).digest()
        digest = hashlib.blake2b(above + key, digest_size=24).digest()
        before = PageName(digest, before.root if before else digest)
        names.append(before)
    return names


class HostPage:
    """A page in the store.

    Attributes:
      name: its name.
      size: bytes that it counts.
      rows: KV entries of all layers and heads as bytes; None before they have arrived, and for good
        if they were lost on the way.
    """

    __slots__ = ("name", "rows", "size")

    def __init__(self, name: PageName, size: int):
        self.name, self.size = name, size
        self.rows: np.ndarray | None = None


class HostPages:
    """The pages that are in host memory; the least recently used ones leave first.

    Args:
      most: bytes that fit.
    """

    def __init__(self, most: int):
        self.most, self.held = most, 0
        """Bytes that fit, and bytes that are here."""
        self._pages: OrderedDict[bytes, HostPage] = OrderedDict()

    def get(self, name: PageName) -> HostPage | None:
        """Returns a page and makes it the most recently used one; None if it is not here."""
        page = self._pages.get(name.key)
        if page is not None:
            self._pages.move_to_end(name.key)
        return page

    def add(self, name: PageName, size: int) -> HostPage:
        """Adds a page that is not here, without rows; pages used longest ago leave for it."""
        page = self._pages[name.key] = HostPage(name, size)
        self.held += size
        while self.held > self.most:
            self.discard(next(iter(self._pages.values())))
        return page

    def discard(self, page: HostPage) -> None:
        """Removes a page, unless it has left or another has taken its place."""
        if self._pages.get(page.name.key) is page:
            del self._pages[page.name.key]
            self.held -= page.size

    def forget(self, root: bytes | None = None) -> None:
        """Removes the pages that continue a first page; None: all."""
        for page in [*self._pages.values()]:
            if root is None or page.name.root == root:
                self.discard(page)


logger = logging.getLogger(__name__)

CHECKSUM = 8
"""Bytes of the checksum at the start of a file."""
BACKLOG_BYTES = 256 << 20
"""Further pages are not written while more bytes than these wait for it."""
LIST_SHARE = 0.05
"""Largest share of the writing thread's time that these looks take."""
KEPT = 0.9
"""Share of the limit that stays when files are deleted for room."""
READERS = 2
"""Threads that read files. More threads would only take turns over small pages, which the system
still has in memory."""
READ_SECONDS = 10.0
"""Longest wait for files. After that no page is found until the folder has been listed again."""


class DiskPages:
    """The pages in a folder that may be used here.

    Args:
      folder: exists, and has nothing but pages: all files in it count, and may be deleted.
      limit: most bytes of all files. A worker learns of what others have written when it lists the
        folder, so several together may exceed the limit for a while.
      identity: at most 16 characters, for everything but salt and tokens that the bytes depend on.
      counters: those named `storage_…` are counted up.

    Raises:
      OSError: the folder cannot be listed.
    """

    readers = READERS
    """Reads at a time."""
    list_seconds = 5.0
    """Shortest time between two looks for files of other workers."""

    def __init__(self, folder: Path | str, limit: int, identity: str, counters: dict[str, float]):
        self._folder, self._limit, self._identity = Path(folder), limit, identity
        self._counters, self._names, self._condemned = counters, set[str](), set[str]()
        self._listed, self._used, self._warned = 0.0, 0, False
        self._taken = self._written = 0  # bytes of pages, each counted by one thread
        self._writer = ThreadPoolExecutor(1, "jaxserve-disk-pages")
        self._readers = ThreadPoolExecutor(self.readers, "jaxserve-disk-reads")
        self._list()

    # ------------------------------------------------------------------- the engine's thread
    def __contains__(self, name: PageName) -> bool:
        return self._file(name) in self._names and self._root(name.root) not in self._condemned

    def look(self) -> None:
        """Has the folder listed for pages of other workers, unless the last list is new."""
        if time.monotonic() > self._listed + self.list_seconds:
            self._listed = float("inf")
            self._start(self._list)

    def condemn(self, root: bytes) -> None:
        """Deletes a first page and all that continue it; this process never keeps them again."""
        self._condemned.add(self._root(root))
        self._start(self._list)

    # ------------------------------------------------------------------------ from any thread
    def keep(self, name: PageName, rows: np.ndarray) -> None:
        """Starts to write a page or, if it is here, to make it the most recently used one."""
        waiting = self._taken - self._written
        if self._root(name.root) not in self._condemned and waiting <= BACKLOG_BYTES:
            self._taken += rows.nbytes
            self._start(self._keep, name, rows)

    def read(self, pages: Sequence[HostPage]) -> None:
        """Reads the rows of pages that have none, several pages at a time. Afterwards a page
        without rows was not here, was damaged, or did not come in time."""
        parts = [pages[first :: self.readers] for first in range(self.readers)]
        try:
            list(self._readers.map(self._read, parts, timeout=READ_SECONDS))
        except TimeoutError:
            self._names = set()
            self._failed(OSError(f"no page came in {READ_SECONDS:g} s"))

    def _root(self, root: bytes) -> str:
        """Returns the part that the names of files with the same first page have in common."""
        return f"{self._identity}-{root.hex()[:12]}"

    def _file(self, name: PageName) -> str:
        return f"{self._root(name.root)}-{name.key.hex()[:32]}"

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        """Has something done by the writing thread."""
        started = self._writer.submit(work, *arguments)
        started.add_done_callback(lambda done: self._failed(done.exception()))

    def _failed(self, error: BaseException | None) -> None:
        """Counts an error, and warns of the first one since a page was written."""
        if error is None:
            return
        self._counters["storage_errors"] += 1
        if not self._warned:
            logger.warning("cache.storage: %s; its pages are computed again", error)
        self._warned = True

    # --------------------------------------------------------------------- the reading threads
    def _read(self, pages: Sequence[HostPage]) -> None:
        """Reads the rows that pages lack. Deletes files that are not whole."""
        for page in pages:
            if page.rows is not None:  # perhaps since a moment ago: others read, too
                continue
            file = self._file(page.name)
            try:
                data = np.frombuffer(self._bytes(file), np.uint8)
                if data[:CHECKSUM].tobytes() == checksum(file, data[CHECKSUM:]):
                    self._touch(file)
                    page.rows = data[CHECKSUM:]
                    self._counters["storage_hits"] += 1
                    self._counters["storage_bytes_read"] += data.size
                    continue
                self._delete(file)
                raise OSError(f"{file} was damaged, and is deleted")
            except FileNotFoundError:  # deleted for room
                pass
            except (OSError, CheckpointError) as error:
                self._failed(error)
            self._names.discard(file)

    # --------------------------------------------------------------------- the writing thread
    def _keep(self, name: PageName, rows: np.ndarray) -> None:
        self._written += rows.nbytes
        file = self._file(name)
        try:
            self._touch(file)
        except FileNotFoundError:
            self._write(file, checksum(file, rows) + rows.data)
            self._counters["storage_bytes_written"] += CHECKSUM + rows.nbytes
            self._used, self._warned = self._used + CHECKSUM + rows.nbytes, False
        self._names.add(file)
        if self._used > self._limit:
            self._list()

    def _list(self) -> None:
        """Lists the folder. Deletes condemned pages and, if there are too many bytes, the least
        recently used pages. A file that cannot be deleted stays, and counts."""
        self._listed, found = time.monotonic(), self._scan()
        full = sum(size for _, _, size in found) > self._limit
        used, names, most = 0, set[str](), self._limit * (KEPT if full else 1)
        for _, name, size in sorted(found, reverse=True):
            try:
                if used + size > most or name.rpartition("-")[0] in self._condemned:
                    self._delete(name)
                    continue
            except (OSError, CheckpointError) as error:
                self._failed(error)
            used += size
            names.add(name)
        self._used, self._names = used, names
        # A large folder is listed more rarely.
        self._listed += (time.monotonic() - self._listed) / LIST_SHARE

    # ------------------------------------------------------------------------------- the folder
    def _scan(self) -> list[tuple[int, str, int]]:
        """Returns when each file was last used (a later time is greater), its name and bytes."""
        found = []
        for entry in os.scandir(self._folder):
            with contextlib.suppress(FileNotFoundError):
                found.append((entry.stat().st_mtime_ns, entry.name, entry.stat().st_size))
        return found

    def _bytes(self, file: str) -> bytes:
        return (self._folder / file).read_bytes()  # half the time of `np.fromfile`

    def _write(self, file: str, data: bytes) -> None:
        write_whole(self._folder / file, data)

    def _touch(self, file: str) -> None:
        """Makes a file the most recently used one. Raises FileNotFoundError if it is not there."""
        os.utime(self._folder / file)

    def _delete(self, file: str) -> None:
        (self._folder / file).unlink(missing_ok=True)


def checksum(file: str, rows: np.ndarray) -> bytes:
    """Returns the checksum of a page's file, which includes the file's name."""
    return zlib.crc32(rows.data, zlib.crc32(file.encode())).to_bytes(CHECKSUM)


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


def page_sizes(programs: PagePrograms) -> tuple[int, int]:
    """Returns the bytes of a page, without its ring page and with it.

    Args:
      programs: their smallest piece is a page.
    """
    whole = programs.parts(programs.page_size, programs.format).values()
    size = sum(array.size * array.dtype.itemsize for array in whole)
    return programs.page_size * programs.token_bytes, size


def packed(arrays: Sequence[np.ndarray], piece: int) -> np.ndarray:
    """Returns wire arrays `[layers, rows, …]` of a piece as one array `[pages, bytes]`.

    Args:
      piece: pages in the arrays. With a ring page there is one.
    """
    parts = []
    for array in arrays:
        rows = np.ascontiguousarray(array).view(np.uint8).reshape(len(array), piece, -1)
        parts.append(np.moveaxis(rows, 1, 0).reshape(piece, -1))
    return np.concatenate(parts, axis=1)


def unpacked(
    pages: Sequence[np.ndarray], shapes: Sequence[jax.ShapeDtypeStruct], piece: int
) -> list[np.ndarray]:
    """Returns the wire arrays of pages in the form of `packed`; zeros fill the piece up."""
    rows = np.zeros((piece, len(pages[0])), np.uint8)
    rows[: len(pages)] = pages
    ends = np.cumsum([shape.size * shape.dtype.itemsize // piece for shape in shapes])
    arrays = []
    for shape, part in zip(shapes, np.split(rows, ends[:-1], axis=1), strict=True):
        layers = np.moveaxis(part.reshape(piece, shape.shape[0], -1), 0, 1)
        arrays.append(layers.reshape(-1).view(shape.dtype).reshape(shape.shape))
    return arrays
