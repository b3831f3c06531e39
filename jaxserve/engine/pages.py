"""The page pool of one DP group: which pages of its KV cache are free.

Called by the scheduler alone, on the leader's host. Pages are ints; the arrays they name live on
the attention mesh and are unknown here.
"""

import itertools
from collections import Counter, deque
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
