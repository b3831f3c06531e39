"""Pages of one DP group: which are free, and the prefix cache, which keeps full pages of earlier
prompts and outputs for reuse.

Called by the scheduler alone, through `DPGroup`, on the leader's host. Pages are ints; the KV
entries they name live on the attention mesh and are unknown here.

The prefix cache is a radix tree with one edge a page, and one root a tenant. A page in the tree is
full and is never written again: a sequence that continues it writes to a page of its own. Edges are
the tokens themselves, not hashes, so a match is always exact.

Layers with a window read only the last pages of a prefix, which lie in a pool of rings. A node
keeps its page there while a sequence reads it, and after that until the pool needs it. A prefix is
found if it ends where the ring pages that its continuation reads are kept.

Ownership: every page belongs to the pool's free list, to one sequence or hold, or to the tree. A
node in use keeps its page, and so do the nodes above it, because a sequence uses a whole path.
Unused nodes stay until pages run out, and are then evicted, least recently used first. A root goes
with its last page: salts are free text of callers, and must not pile up.
"""

import itertools
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence

from jaxserve.roles.layout import pages_for

QUARANTINE = 4
"""Inverse of the largest share of the pool that may be in quarantine."""
NO_PAGE = 2**30
"""Page id that no pool has: nothing is written to it."""


class PageAllocator:
    """Hands out pages and takes them back. A page is either free or taken. Pages in quarantine
    count as taken.

    Args:
      pages: number of pages.
      first: the lowest page id; lower ids belong to no pool.
    """

    def __init__(self, pages: int, first: int = 0):
        if pages < 1:
            raise ValueError(f"a page pool of {pages} pages")
        self._ids = range(first, first + pages)
        self._taken = [False] * (first + pages)
        self._quarantined: deque[int] = deque()
        self.most_quarantined = pages // QUARANTINE
        """Most pages that are in quarantine at a time."""
        self._free = list(reversed(self._ids))  # a stack: low pages first, freed ones before others

    @property
    def pages(self) -> int:
        """Pages in the pool."""
        return len(self._ids)

    @property
    def free_pages(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Takes `count` pages; None, and takes nothing, if fewer are free."""
        if count < 0:
            raise ValueError(f"cannot allocate {count} pages")
        if count > len(self._free):
            return None
        page_ids = [self._free.pop() for _ in range(count)]
        for page_id in page_ids:
            self._taken[page_id] = True
        return page_ids

    def free(self, page_ids: Sequence[int]) -> None:
        """Takes pages back. Raises ValueError, and takes none, if one is free or foreign."""
        for page_id, times in Counter(page_ids).items():
            if page_id not in self._ids:
                raise ValueError(f"page {page_id} is not in the pool of {self.pages} pages")
            if times > 1 or not self._taken[page_id]:
                raise ValueError(f"page {page_id} is freed twice")
        for page_id in page_ids:
            self._taken[page_id] = False
        self._free.extend(reversed(page_ids))

    @property
    def quarantined(self) -> int:
        """Number of pages in quarantine."""
        return len(self._quarantined)

    def quarantine(self, page_ids: Sequence[int]) -> None:
        """Puts pages in quarantine whose entries led to NaN or infinite results. They are handed
        out again once absolved, or when too many are in quarantine, the oldest first. Reuse is
        safe: every page is written before it is read."""
        self._quarantined.extend(page_ids)
        while len(self._quarantined) > self.most_quarantined:
            self.free([self._quarantined.popleft()])

    def absolve(self, page_ids: Sequence[int]) -> None:
        """Frees pages of the quarantine that turned out not to have caused the bad results."""
        for page_id in page_ids:
            if page_id in self._quarantined:
                self._quarantined.remove(page_id)
                self.free([page_id])

    def integrity(self, owned: Iterable[Iterable[int]]) -> Iterator[None]:
        """Raises RuntimeError unless every page is free, or owned by exactly one sequence.

        Yields before each page: a caller without time drops the iterator, and must drop it once a
        page changes hands.

        Args:
          owned: the pages of every sequence.
        """
        seen, first = bytearray(self.pages), self._ids.start
        contested, foreign = list[int](), list[int]()
        if any(map(self._taken.__getitem__, self._free)):
            raise RuntimeError("a page is on the free list and marked as taken")
        for page_id in itertools.chain(self._free, self._quarantined, *owned):
            yield
            if page_id not in self._ids:
                foreign.append(page_id)
                continue
            if seen[page_id - first]:
                contested.append(page_id)
            seen[page_id - first] = 1
        unclaimed = [page for page in self._ids if not seen[page - first]] if 0 in seen else []
        if unclaimed or contested or foreign:
            raise RuntimeError(
                f"page pool of {self.pages}: lost pages {unclaimed}, pages claimed more than once "
                f"{contested}, foreign pages {foreign}"
            )


class RingPool(PageAllocator):
    """Page pool of layers with a window, which read only a sequence's last pages: its ring.

    In layers with states a page holds the state behind the last token that was fed to it, so that a
    token reads the page of the token before it. A step writes the page of its last token that is no
    draft, and no other. Without a prefix cache one page serves all places of a sequence.

    With a prefix cache a running sequence needs three pages at most, whatever their size: the one
    behind its last full page, which its next step reads or later sequences start from, and one for
    each of two steps in flight. The host may not know how many drafts of the first step are right,
    and so where the second one writes. As drafts end with the page of the token before them
    (`LaneSlots.drafts`), that is the page which the first step writes, or the next one. A held
    prompt needs one page, the state behind it.

    Args:
      pages, first: see `PageAllocator`.
      window: tokens that a token attends to, itself included; 0: states.
      page_size: tokens a page.
    """

    def __init__(self, pages: int, first: int, window: int, page_size: int):
        super().__init__(pages, first)
        self.states = not window
        """True if pages hold states."""
        self._window, self._page_size = window or 2, page_size
        self.window_pages = pages_for(self._window, page_size)
        """Number of pages that a window fills."""

    def first_read(self, tokens: int) -> int:
        """Returns the place of the first page that the token after `tokens` tokens reads."""
        return max(tokens + 1 - self._window, 0) // self._page_size

    def first_kept(self, tokens: int) -> int:
        """Returns the place of the first page that a sequence with `tokens` cached tokens keeps:
        the first that it reads, or the state behind its last full page, for sequences to come."""
        return max(tokens // self._page_size - 1, 0) if self.states else self.first_read(tokens)


class PageKeys:
    """Keys of a sequence's full pages, made once for the caches of all DP groups.

    A page's key is the bytes of its token ids, which keep their hash.

    Args:
      salt: sequences with different salts (tenants) share nothing.
      tokens: tokens of the sequence; more may be appended.
      page_size: tokens a page.
    """

    __slots__ = ("_made", "_page_size", "_tokens", "salt")

    def __init__(self, salt: str, tokens: array[int], page_size: int):
        self.salt = salt.encode("utf-8", "surrogatepass")
        self._tokens, self._page_size = tokens, page_size
        self._made: list[bytes] = []

    def first(self, pages: int) -> list[bytes]:
        """Returns the keys of this number of first pages, all of which must be full."""
        if pages > len(self._made):
            self[pages - 1]
        return self._made[:pages]

    def __getitem__(self, page: int) -> bytes:
        """Returns the key of a page, which must be full."""
        made, size = self._made, self._page_size
        for start in range(len(made) * size, (page + 1) * size, size):
            made.append(self._tokens[start : start + size].tobytes())
        return made[page]


class PageNode:
    """A page in the tree.

    Attributes:
      page_id: in the group's pool; -1 in a root.
      key: the tokens that it holds, see `PageKeys`.
      parent: the page before it, or a root.
      children: the pages that follow it, by their keys.
      users: sequences that hold it.
      ring: the page's id in the ring pool; -1: it is not kept.
      readers: sequences and holds whose ring has that page.
    """

    __slots__ = ("children", "key", "page_id", "parent", "readers", "ring", "users")

    def __init__(self, page_id: int, key: bytes, parent: "PageNode | None"):
        self.page_id = page_id
        self.key = key
        self.parent = parent
        self.children: dict[bytes, PageNode] = {}
        self.users = self.readers = 0
        self.ring = -1


class PrefixCache:
    """Radix tree of one DP group.

    Args:
      pool: takes evicted pages back.
      page_size: tokens a page.
      rings: takes ring pages back; None: no layer has a window.
    """

    def __init__(self, pool: PageAllocator, page_size: int, rings: RingPool | None = None):
        self._pool, self._rings = pool, rings
        self._kept: OrderedDict[PageNode, bool] = OrderedDict()
        """Nodes with a ring page that no sequence reads, the next to lose it first, and whether a
        later prefix is likely to end there."""
        self._page_size = page_size
        self._roots: dict[bytes, PageNode] = {}
        self._forgotten: set[PageNode] = set()
        """Roots from before a reset or condemnation: pages in use that match nothing."""
        # Nodes without users, least recently used first. A path is released from its end, so a
        # node comes after everything below it, and the first one is always a leaf.
        self._idle: OrderedDict[PageNode, None] = OrderedDict()

    @property
    def idle(self) -> int:
        """Pages that no sequence uses, which `evict` can give back."""
        return len(self._idle)

    def match(self, keys: PageKeys, longest: int) -> list[PageNode]:
        """Returns the path of a sequence's longest cached prefix, of at most `longest` of its
        tokens.

        The caller does not hold it yet: see `acquire`.
        """
        path: list[PageNode] = []
        node = self._roots.get(keys.salt)
        usable = kept = 0
        for key in keys.first(longest // self._page_size):
            node = node and node.children.get(key)
            if node is None:
                break
            path.append(node)
            # `kept` counts the pages in a row up to this one whose ring pages are held. They have
            # to cover what the next token reads. Behind a gap a longer prefix may qualify again.
            kept = kept + 1 if node.ring >= 0 else 0
            first = self._rings.first_read(len(path) * self._page_size) if self._rings else 0
            if not self._rings or kept >= len(path) - first:
                usable = len(path)
        return path[:usable]

    def read(self, node: PageNode) -> int:
        """Adds a reader to a node's ring page; returns the page's id."""
        if not node.readers:
            del self._kept[node]
        node.readers += 1
        return node.ring

    def unread(self, node: PageNode, *, keep: bool) -> None:
        """Ends a reader's use of a node's ring page.

        Args:
          keep: whether later prefixes are likely to end with this page; others are dropped first.
        """
        node.readers -= 1
        if not node.readers:
            self._kept[node] = keep
            self._kept.move_to_end(node, last=keep)

    def evict_rings(self, count: int) -> None:
        """Gives back up to `count` ring pages that no sequence reads."""
        for _ in range(min(count, len(self._kept))):
            self._drop_ring(next(iter(self._kept)))

    def _drop_ring(self, node: PageNode) -> None:
        if node.ring >= 0 and self._rings is not None:
            del self._kept[node]
            self._rings.free([node.ring])
            node.ring = -1

    def acquire(self, path: Iterable[PageNode]) -> None:
        """Holds a path for one more user."""
        for node in path:
            if not node.users:
                del self._idle[node]
            node.users += 1

    def release(self, path: Sequence[PageNode]) -> None:
        """Ends one user's hold of a path."""
        for node in reversed(path):
            node.users -= 1
            if not node.users:
                self._idle[node] = None

    def condemn(self, path: Sequence[PageNode]) -> None:
        """Makes a held path, and all that continues it, match no more."""
        # Any page of the path may be the damaged one, so its first goes, with all that follows.
        top = path[0]
        assert top.parent is not None
        if top.parent in self._forgotten:
            return
        self._detach(top)
        # Under a root that nothing matches, the path is still there for its users to release.
        top.parent = PageNode(-1, b"", None)
        top.parent.children[top.key] = top
        self._forgotten.add(top.parent)

    def extend(self, path: list[PageNode], keys: PageKeys, page_id: int, ring: int = -1) -> bool:
        """Adds the page that follows a held path. The tree then owns it, and the path holds it,
        too.

        If the tree already has a page with the same tokens, the new one replaces it if that is
        unused, and otherwise nothing happens.

        Args:
          path: extended in place.
          keys: keys of the sequence that has the page.
          ring: the page's id in the ring pool, if the sequence still reads it.

        Returns:
          True if the page was added.
        """
        if path:
            parent = path[-1]
        else:
            parent = self._roots.setdefault(keys.salt, PageNode(-1, keys.salt, None))
        key = keys[len(path)]
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = PageNode(page_id, key, parent)
        elif node.users:
            return False
        else:  # steps in flight read the sequence's own page, so the idle one of the two goes
            del self._idle[node]
            self._pool.free([node.page_id])
            self._drop_ring(node)
            node.page_id = page_id
        node.users, node.ring, node.readers = 1, ring, int(ring >= 0)
        path.append(node)
        return True

    def evict(self, count: int) -> None:
        """Gives the `count` least recently used pages, or all, back to the pool."""
        for _ in range(min(count, len(self._idle))):
            node, _ = self._idle.popitem(last=False)
            assert not node.children
            self._detach(node)
            self._pool.free([node.page_id])
            self._drop_ring(node)

    def reset(self) -> int:
        """Empties the cache. Pages in use stay with their sequences and are not matched any more.

        Returns:
          number of pages that went back to the pool.
        """
        unused = self.idle
        self.evict(unused)
        # The roots that are left have pages in use; `_detach` drops them with the last of these.
        self._forgotten.update(self._roots.values())
        self._roots.clear()
        return unused

    def integrity(
        self, held: Iterable[Sequence[PageNode]], read: Iterable[PageNode] = ()
    ) -> Iterator[None]:
        """Raises RuntimeError unless users, readers, order and links add up; yields as
        `PageAllocator.integrity`.

        Args:
          held: the path that every sequence holds.
          read: the nodes whose ring pages sequences and holds read, once for each.
        """
        readers, users, nodes = Counter(read), Counter[PageNode](), set[PageNode]()
        for path in held:
            yield
            users.update(path)
        for node in self.nodes():
            yield
            nodes.add(node)
        if foreign := [node for node in users if node not in nodes]:
            raise RuntimeError(
                f"pages {sorted(n.page_id for n in foreign)} are held but not cached"
            )
        if not all(root.children for root in self._all_roots()):
            raise RuntimeError("a root without pages was kept")
        if not self._kept.keys() <= nodes:
            raise RuntimeError("a ring page is kept of a page that is not cached")
        for node in nodes:
            yield
            parent, unread = node.parent, node.ring >= 0 and not node.readers
            holding, reading = users[node], readers[node]
            problems = {
                "is idle or not, against its users": bool(node.users) == (node in self._idle),
                "has a kept ring page or not, against its readers": unread != (node in self._kept),
                f"has {node.users} users, but {holding} sequences hold it": node.users != holding,
                f"has {node.readers} readers of its ring, not {reading}": node.readers != reading,
                "is not where its tokens say": parent is None
                or parent.children.get(node.key) is not node
                or len(node.key) != self._page_size * array("i").itemsize,
                "is used, and the page before it is not": parent is not None
                and bool(node.users)
                and parent.page_id >= 0
                and not parent.users,
            }
            for problem, found in problems.items():
                if found:
                    raise RuntimeError(f"cached page {node.page_id} {problem}")
        seen: set[PageNode] = set()
        for node in self._idle:
            yield
            if node not in nodes or not seen.issuperset(node.children.values()):
                raise RuntimeError(f"cached page {node.page_id} would go before those behind it")
            seen.add(node)

    def _detach(self, node: PageNode) -> None:
        """Takes a node from its parent; drops the parent if that is a root without other pages."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        if parent.parent is None and not parent.children:
            if parent in self._forgotten:
                self._forgotten.remove(parent)
            else:
                del self._roots[parent.key]

    def _all_roots(self) -> list[PageNode]:
        return [*self._roots.values(), *self._forgotten]

    def nodes(self) -> Iterator[PageNode]:
        """Yields all pages of the tree."""
        rest = self._all_roots()
        while rest:
            node = rest.pop()
            rest += node.children.values()
            if node.parent is not None:
                yield node
