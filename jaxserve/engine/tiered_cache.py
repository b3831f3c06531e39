"""The prefix cache and the fetches of an engine with pages in host memory (`page_tier.py`): they
decide which pages leave the device, and which come back for a sequence."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from itertools import islice, takewhile

from jaxserve.engine.admission import Fetches
from jaxserve.engine.dp_group import DPGroup
from jaxserve.engine.host_pages import PageName, page_names
from jaxserve.engine.lane_slots import LaneSlots
from jaxserve.engine.page_tier import PageTier
from jaxserve.engine.prefix_cache import PageKeys, PageNode, PrefixCache
from jaxserve.engine.sequence import Sequence
from jaxserve.link.pages.source import PagesSource

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
                if self._kept.get(node):
                    new = [*takewhile(lambda each: each not in path, node.upwards())]
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
