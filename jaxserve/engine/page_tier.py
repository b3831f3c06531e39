"""KV pages in host memory: the tier below the prefix caches of an engine (`cache.host_gb`).

A page that a prefix cache evicts is read into host memory by the gather program of hand-offs. The
program is enqueued before the page is handed out again, so no later step writes the page first.
When a sequence is admitted, the pages here that continue its prefix on the device are written into
its own pages, as those of a hand-off are (`tiered_cache.py`). Pages of a preempted sequence come
back, too, because it leaves them to the prefix cache.

With recurrent states, and with layers that have a window, a sequence can only start where its ring
is kept: the state behind a page, or the last pages of the window. When the device gives up ring
pages that later sequences are likely to start from (at the end of a turn or a prompt, or where
prompts part), each page is read together with its ring page, as one more page here. So are the
pages before it, without theirs. A prefix that is found ends with the ring that the token behind it
reads.

With `cache.storage` pages are also written to a folder (`disk_pages.py`) or bucket: those evicted,
and, by way of host memory, those of a sequence when it leaves. Pages that host memory lacks are
read there, into host memory: when a sequence is admitted or, earlier, while it is the first that
waits for a slot or for pages.

The engine's thread decides and enqueues. One further thread waits for what the device reads. A few
bring what goes back, a request each. Nothing waits for them but the sequences whose pages they
bring.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain

import jax
import numpy as np

from jaxserve.engine.admission import FetchOrder
from jaxserve.engine.disk_pages import DiskPages
from jaxserve.engine.host_pages import HostPage, HostPages, PageName
from jaxserve.engine.loop import Loop
from jaxserve.engine.pages import RingPool
from jaxserve.engine.prefix_cache import PageNode
from jaxserve.engine.request import TokenOutput
from jaxserve.engine.stepper import Post
from jaxserve.roles.layout import PageRun
from jaxserve.roles.page_programs import PagePrograms
from jaxserve.roles.page_transfer import PageAccess

logger = logging.getLogger(__name__)

READ_BYTES = 256 << 20
"""Most bytes of pages that were read on the device and are not in host memory yet. Pages that are
evicted meanwhile are lost. One piece is always read."""
PIECES = 4
"""Most pieces that are back on the device and not written yet."""
WRITE_SECONDS = 60.0
"""Longest wait for the engine to write a piece."""
AT_ONCE = 4
"""Requests whose pages are brought at a time."""
COUNTERS = (
    *("queries", "hits", "saved", "lost", "bytes_saved", "bytes_restored"),
    *("save_seconds", "restore_seconds", "held_bytes", "storage_hits", "storage_errors"),
    *("storage_bytes_read", "storage_bytes_written"),
    *("prefetched", "prefetched_bytes", "prefetch_seconds"),
)
"""Counters of a tier: pages looked for and found; pages copied to the host, and ones that were not
(too many at a time, or the device failed); bytes copied either way; seconds from the decision to
host memory, summed over reads, and from admission until all pages are back on the device, summed
over requests; bytes held now; of the folder: pages found there alone, failed reads, writes and
lists, and bytes of files; of the reads from it while a request waits: pages, their bytes, and
seconds from the decision until the last page is in host memory, summed over requests."""


class PageTier:
    """Host memory below the prefix caches of all domains of an engine.

    Args:
      accesses: the pages of each domain.
      limit: bytes of host memory.
      loop: the engine's, used on its thread alone.
      post: see `Post`.
      ended: returns whether the engine does nothing more.
    """

    def __init__(
        self,
        accesses: Items[PageAccess],
        limit: int,
        loop: Loop,
        post: Post,
        ended: Callable[[], bool],
    ):
        self._accesses, self._loop, self._post, self._ended = accesses, loop, post, ended
        self.counters: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        """See `COUNTERS`; any thread may read them."""
        programs, tokens = accesses[0].transfer.programs, accesses[0].transfer.pieces
        self._size, self._format = programs.page_size, programs.format
        self._tables = programs.tables
        # With rings the piece of one page has its ring page, too, and other pieces have none.
        self._pieces = [each // self._size for each in tokens][programs.closes :]
        self._sizes, self._store = page_sizes(programs), HostPages(limit)
        self._reading = 0  # bytes
        self._room = threading.Semaphore(PIECES)
        self._copies = ThreadPoolExecutor(1, "jaxserve-host-pages")
        self._returns = ThreadPoolExecutor(AT_ONCE, "jaxserve-pages-back")
        self.disk: DiskPages | None = None
        """Pages in a folder; None: there is no folder."""

    # ------------------------------------------------------------------- the engine's thread
    def save(self, domain: int, group: int, pages: Items[tuple[PageName, PageNode]]) -> None:
        """Starts to read pages that are about to be handed out again.

        Args:
          pages: of the DP group, every page behind those that continue it. The first ones are lost
            if there are too many.
        """
        wanted = [(name, node) for name, node in pages if self._store.get(name) is None]
        wanted.sort(key=lambda pair: pair[0].ring)
        for start, end, piece in reversed([*self._parts([name for name, _ in wanted])]):
            part = wanted[start:end]
            size = sum(self._sizes[name.ring] for name, _ in part)
            if self._reading and self._reading + size > READ_BYTES:
                self.counters["lost"] += len(part)
                continue
            self._reading += size
            ids = [(node.page_id, node.ring)[: self._tables] for _, node in part]
            run = PageRun(group, [*chain.from_iterable(ids)])
            arrays = self._accesses[domain].read(run, len(part) * self._size, piece * self._size)
            for array in arrays:
                array.copy_to_host_async()
            kept = [self._store.add(name, self._sizes[name.ring]) for name, _ in part]
            self._copies.submit(self._land, kept, arrays, piece, time.monotonic())
        self._used(name for name, _ in pages)
        self.counters["held_bytes"] = self._store.held

    def find(self, names: Items[PageName], cached: int, rings: RingPool | None) -> list[HostPage]:
        """Returns the first of these pages, as far as they are here or in the folder, and with them
        the ring pages that the token behind them reads.

        Args:
          names: of successive pages.
          cached: pages before these, which the sequence has on the device with their ring.
          rings: of its DP group.
        """
        found = [*self._there(names)]
        while found and rings:
            first = max(rings.first_read((cached + len(found)) * self._size) - cached, 0)
            last = [*self._there(page.name.with_ring for page in reversed(found[first:]))]
            lacks = len(found) - 1 - len(last)  # the last place without a ring page
            if lacks < first:
                found[first:] = reversed(last)
                break
            del found[lacks:]
        self._used(page.name for page in reversed(found))
        if self.disk and len(found) < len(names):
            self.disk.look()
        return found

    def prefetch(
        self, names: Items[PageName], cached: int, rings: RingPool | None, disk: DiskPages
    ) -> None:
        """Starts to read the first of these pages from the folder into host memory; see `find`."""
        found = self.find(names[: self._store.most // self._sizes[False]], cached, rings)
        lacking = [page for page in found if page.rows is None and page.name in disk]
        if lacking:
            self._returns.submit(self._prefetch, lacking, disk, time.monotonic())

    def restore(self, domain: int, order: FetchOrder, pages: Items[HostPage]) -> None:
        """Starts to bring found pages to the device, for a fetch that has begun."""
        work = partial(self._bring, domain, order, pages, time.monotonic())
        lacking = [page.name for page in pages if page.rows is None]
        if all(self.disk and name in self.disk for name in lacking):
            self._returns.submit(work)
        else:  # after those that the device still reads
            self._copies.submit(self._returns.submit, work)

    def forget(self, root: bytes | None = None) -> None:
        """Drops the pages that continue a first page, in the folder, too; or all in host memory."""
        self._store.forget(root)
        if self.disk and root:
            self.disk.condemn(root)
        self.counters["held_bytes"] = self._store.held

    def _there(self, names: Iterable[PageName]) -> Iterator[HostPage]:
        """Yields the pages up to the first one that is neither here nor in the folder."""
        for name in names:
            page = self._store.get(name)
            if page is None and self.disk is not None and name in self.disk:
                page = self._store.add(name, self._sizes[name.ring])
            if page is None:
                break
            yield page

    def _used(self, names: Iterable[PageName]) -> None:
        """Makes pages that are here the most recently used ones, one after the other."""
        for name in names:
            self._store.get(name)

    def _parts(self, names: Items[PageName]) -> Iterator[tuple[int, int, int]]:
        """Yields the pieces in which pages cross, those with ring pages last: the first page, the
        one behind the last, and the size in pages, of which less than half is padding if more than
        a page crosses."""
        end, plain = 0, sum(not name.ring for name in names)
        while (start := end) < len(names):
            left = plain - start
            sizes = self._pieces if left > 0 else [1]
            fits = [size for size in sizes if size < 2 * left] or sizes[:1]
            piece = next((size for size in fits if size >= left), fits[-1])
            end += min(piece, max(1, left))
            yield start, end, piece

    # ---------------------------------------------------------------------- the other threads
    def _land(
        self, pages: Items[HostPage], arrays: Items[jax.Array], piece: int, since: float
    ) -> None:
        """Waits for what the device reads, and keeps it page by page."""
        size = sum(page.size for page in pages)
        try:
            for page, rows in zip(pages, packed([*map(np.asarray, arrays)], piece), strict=False):
                page.rows = rows.copy()
                if self.disk:
                    self.disk.keep(page.name, page.rows)
            self.counters["saved"] += len(pages)
            self.counters["bytes_saved"] += size
            self.counters["save_seconds"] += time.monotonic() - since
        except Exception as error:  # a step before it failed on the device
            logger.warning("%d KV pages did not reach host memory: %s", len(pages), error)
            self.counters["lost"] += len(pages)

        self._post(partial(self._landed, pages, size))

    def _prefetch(self, pages: Items[HostPage], disk: DiskPages, since: float) -> None:
        """Reads pages for a sequence that waits. Those that do not come are as if never found."""
        disk.read(pages)
        sizes = [page.size for page in pages if page.rows is not None]
        self.counters["prefetched"] += len(sizes)
        self.counters["prefetched_bytes"] += sum(sizes)
        self.counters["prefetch_seconds"] += time.monotonic() - since
        self._post(partial(self._landed, pages, 0))

    def _bring(self, domain: int, order: FetchOrder, pages: Items[HostPage], since: float) -> None:
        """Puts pages on the devices of a DP group, piece by piece, and has them written."""
        for start, end, piece in self._parts([page.name for page in pages]):
            try:
                arrays = self._put(domain, order.group, pages[start:end], piece)
                self._wait_for_room()
            except Exception as error:
                logger.warning("KV pages did not come from host memory: %s", error)
                self._post(partial(self._failed, domain, order.ticket, pages))
                return
            first, part = order.start + start * self._size, pages[start:end]
            self._post(partial(self._write, domain, order.ticket, first, part, arrays))
        self.counters["restore_seconds"] += time.monotonic() - since

    def _wait_for_room(self) -> None:
        """Waits until fewer than `PIECES` pieces wait to be written. Raises TimeoutError."""
        end = time.monotonic() + WRITE_SECONDS
        while not self._room.acquire(timeout=0.5):
            if self._ended() or time.monotonic() > end:
                raise TimeoutError("the engine wrote no piece")

    def _put(self, domain: int, group: int, pages: Items[HostPage], piece: int) -> Items[jax.Array]:
        transfer = self._accesses[domain].transfer
        landing = transfer.landing(group, piece * self._size, self._format)
        if self.disk:
            self.disk.read(pages)
        rows = [page.rows for page in pages if page.rows is not None]
        if len(rows) < len(pages):
            raise ValueError(f"{len(pages) - len(rows)} pages were lost")
        arrays = unpacked(rows, landing, piece)
        put = jax.device_put(arrays, [shape.sharding for shape in landing])
        return jax.block_until_ready(put)  # one that failed would take the device's pages along

    # ------------------------------------------------------------------- the engine's thread
    def _landed(self, pages: Items[HostPage], read: int) -> list[TokenOutput]:
        """Drops pages that did not come.

        Args:
          read: bytes that are not on their way from the device any more.
        """
        self._reading -= read
        for page in pages:
            if page.rows is None:
                self._store.discard(page)
        return []

    def _write(
        self, domain: int, ticket: int, first: int, pages: Items[HostPage], arrays: Items[jax.Array]
    ) -> list[TokenOutput]:
        """Writes a piece of some pages from its first token on, unless its sequence has left."""
        self._room.release()
        tokens = len(pages) * self._size
        run = self._loop.schedulers[domain].fetches.run(ticket, first, tokens)
        if run is not None:
            ((_, _, piece),) = self._parts([page.name for page in pages])
            self._accesses[domain].write(run, piece * self._size, self._format, arrays)
            self._loop.imported(domain, ticket, tokens)
            self.counters["bytes_restored"] += sum(page.size for page in pages)
        return []

    def _failed(self, domain: int, ticket: int, pages: Items[HostPage]) -> list[TokenOutput]:
        """Lets a sequence compute what did not come, whatever `pages.on_failure` says."""
        self._loop.schedulers[domain].fetches.failed(ticket)
        return self._landed(pages, 0)


def page_sizes(programs: PagePrograms) -> tuple[int, int]:
    """Returns the bytes of a page, without its ring page and with it.

    Args:
      programs: their smallest piece is a page.
    """
    whole = programs.parts(programs.page_size, programs.format).values()
    size = sum(array.size * array.dtype.itemsize for array in whole)
    return programs.page_size * programs.token_bytes, size


def packed(arrays: Items[np.ndarray], piece: int) -> np.ndarray:
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
    pages: Items[np.ndarray], shapes: Items[jax.ShapeDtypeStruct], piece: int
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
