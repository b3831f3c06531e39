"""KV pages in host memory: the tier below the prefix caches of an engine (`cache.host_gb`).

A page that a prefix cache evicts is read into host memory by the gather program of hand-offs. The
program is enqueued before the page is handed out again, so no later step writes the page first.
When a sequence is admitted, the pages here that continue its prefix on the device are written into
its own pages, as those of a hand-off are (`TierFetches`). Pages of a preempted sequence come
back, too, because it leaves them to the prefix cache.

With recurrent states, and with layers that have a window, a sequence can only start where its ring
is kept: the state behind a page, or the last pages of the window. When the device gives up ring
pages that later sequences are likely to start from (at the end of a turn or a prompt, or where
prompts part), each page is read together with its ring page, as one more page here. So are the
pages before it, without theirs. A prefix that is found ends with the ring that the token behind it
reads.

With `cache.storage` pages are also written to a folder or bucket (`page_stores.py`): those evicted,
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
from itertools import chain, islice

import jax
import numpy as np

from jaxserve.engine.admission import Fetches, FetchOrder
from jaxserve.engine.dp_group import DPGroup
from jaxserve.engine.lane_slots import LaneSlots
from jaxserve.engine.loop import Loop
from jaxserve.engine.page_stores import (
    DiskPages,
    HostPage,
    HostPages,
    PageName,
    packed,
    page_names,
    page_sizes,
    unpacked,
)
from jaxserve.engine.pages import PageKeys, PageNode, PrefixCache, RingPool
from jaxserve.engine.request import TokenOutput
from jaxserve.engine.sequence import Sequence
from jaxserve.engine.stepper import Post
from jaxserve.link.pages.source import PagesSource
from jaxserve.roles.layout import PageRun
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
        """Drops pages that did not come, and counts `read` bytes as no longer on their way from the
        device."""
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


AHEAD = 32
"""Inverse of the share of the pool that is evicted at a time, so that a read has several pages."""


class TieredCache(PrefixCache):
    """A prefix cache whose evicted pages go to a tier.

    Args:
      group: has the pages.
      page_size: tokens a page.
      tier: takes the pages.
      domain: the group's.
    """

    def __init__(self, group: DPGroup, page_size: int, tier: PageTier, domain: int):
        super().__init__(group.pool, page_size, group.rings)
        self._tier, self._domain, self._group = tier, domain, group.index
        self._ahead = group.pool.pages // AHEAD
        self._names: dict[PageNode, PageName] = {}
        """Names of the cached pages, without those below a root that was forgotten."""

    def extend(self, path: list[PageNode], keys: PageKeys, page_id: int, ring: int = -1) -> bool:
        """Adds the page that follows a held path, with its name; see `PrefixCache.extend`."""
        named, before = not path, self._names.get(path[-1]) if path else None
        added = super().extend(path, keys, page_id, ring)
        if added and (named or before):
            (self._names[path[-1]],) = page_names(keys.salt, [path[-1].key], before)
        return added

    def release(self, path: Items[PageNode]) -> None:
        """Ends one user's hold of a path; pages that a folder lacks go there."""
        super().release(path)
        if (disk := self._tier.disk) is not None:
            # The first page comes last, so that it is the last of them to be deleted for room.
            self._save(path[::-1], lambda name: name not in disk)

    def evict_rings(self, count: int) -> None:
        """Gives back `count` ring pages that no sequence reads, or all, and those that follow them
        in one window: without the first of them nothing could start behind it."""
        leaving: list[PageNode] = []
        for node in self._kept:
            if len(leaving) >= count and node.parent is not leaving[-1]:
                break
            leaving.append(node)
        self._save(leaving)
        super().evict_rings(len(leaving))

    def evict(self, count: int) -> None:
        """Gives the `count` least recently used pages, or some more, back to the pool."""
        leaving = [*islice(self._idle, max(count, self._ahead))]
        self._save(leaving)
        super().evict(len(leaving))
        for node in leaving:
            self._names.pop(node, None)

    def reset(self) -> int:
        """Empties the cache, and the tier."""
        self._names.clear()  # so that none is saved: after a lost step the pages hold nothing
        self._tier.forget()
        return super().reset()

    def condemn(self, path: Items[PageNode]) -> None:
        """Makes a held path, and all that continues it, match no more, in the tier neither."""
        if (top := self._names.get(path[0])) is not None:
            self._tier.forget(top.root)
            self._names = {at: name for at, name in self._names.items() if name.root != top.root}
        super().condemn(path)

    def _save(self, nodes: Iterable[PageNode], wanted: Callable[[PageName], bool] = bool) -> None:
        """Saves those pages that have a name. With rings these are pages whose ring pages are worth
        keeping, and all before them, which need not leave the device with them."""
        if self._rings:
            path: dict[PageNode, None] = {}  # every page behind the one that it continues
            for node in nodes:
                new, at = [], node if self._kept.get(node) else None
                while at and at.parent and at not in path:
                    new.append(at)
                    at = at.parent
                path.update(dict.fromkeys(reversed(new)))
            nodes = reversed(path)
        pages = [(self._names[node], node) for node in nodes if node in self._names]
        # The ring pages that sequences read are some of the same window, and worth as much.
        rings = [(name.with_ring, at) for name, at in pages if self._kept.get(at, at.ring >= 0)]
        every = [pair for pair in rings + pages if wanted(pair[0])]
        self._tier.save(self._domain, self._group, every)


class TierFetches(Fetches):
    """Fetches of one domain from other workers and from a tier.

    Args:
      groups, lanes: see `Fetches`.
      tier: asked for the pages of sequences without a source.
      domain: number of the domain.
    """

    def __init__(
        self, groups: Items[DPGroup], lanes: Items[LaneSlots], tier: PageTier, domain: int
    ):
        super().__init__(groups, lanes)
        self._tier, self._domain = tier, domain
        self._prepared: tuple[float, int] | None = None  # rank of the sequence

    def prepare(self, sequence: Sequence) -> None:
        """Starts to read the pages in the folder that the first waiting sequence will need, once:
        it has them in host memory when it is admitted."""
        disk = self._tier.disk
        if disk is not None and sequence.source is None and sequence.rank != self._prepared:
            self._prepared = sequence.rank
            cached = max(len(group.match(sequence)) for group in self._groups)
            self._tier.prefetch(self._names(sequence, cached), cached, self._groups[0].rings, disk)

    def begin(self, sequence: Sequence) -> None:
        """Lets an admitted sequence wait for entries that only its source or the tier has."""
        if sequence.source is not None or sequence.home is None:
            return super().begin(sequence)
        slots, row = self._row(sequence)
        size, cached = slots.page_size, int(slots.cached[row]) // slots.page_size
        names = self._names(sequence, cached)
        found = self._tier.find(names, cached, self._groups[sequence.home.group].rings)
        self._tier.counters["queries"] += len(names)
        self._tier.counters["hits"] += len(found)
        if not found:
            return None
        sequence.source = PagesSource("", "", (cached + len(found)) * size, "")
        super().begin(sequence)
        sequence.source = None
        self._tier.restore(self._domain, self._new.pop(), found)
        return None

    def _names(self, sequence: Sequence, cached: int) -> list[PageName]:
        """Returns the names of the pages that a sequence can reuse, without the first `cached`."""
        keys = sequence.keys.first(sequence.reusable // self._lanes[0].page_size)
        return page_names(sequence.keys.salt, keys)[cached:]

    def _finish(self, ticket: int) -> int:
        """Lets the sequence go on; its cached tokens include those from the tier."""
        fetch, done = self._fetches[ticket], super()._finish(ticket)
        sequence = fetch.sequence
        if not (fetch.order.source.address or sequence.generated):
            sequence.found = min(done, len(sequence.request.prompt))
        return done
