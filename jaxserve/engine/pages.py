"""The page pool of one DP group: which pages of its KV cache are free.

Called by the scheduler alone, on the leader's host. Pages are ints; the arrays they name live on
the attention mesh and are unknown here.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence

QUARANTINE = 4
"""At most one page in so many is kept away for what it gave."""
NO_PAGE = 2**30
"""A page id that no pool has: nothing is written there."""


def pages_for(tokens: int, page_size: int) -> int:
    """The number of pages that hold `tokens` tokens."""
    return -(-tokens // page_size)


class PageAllocator:
    """Hands out pages and takes them back. A page is free or taken, never both; one in quarantine
    is taken.

    Args:
      pages: how many.
      first: the lowest page id; those below belong to nobody.
    """

    def __init__(self, pages: int, first: int = 0):
        if pages < 1:
            raise ValueError(f"a page pool of {pages} pages")
        self._ids = range(first, first + pages)
        self._taken = [False] * (first + pages)
        self._quarantined: deque[int] = deque()
        self.most_quarantined = pages // QUARANTINE
        """The most pages that are kept away."""
        self._free = list(reversed(self._ids))  # a stack: low pages first, freed ones again soon

    @property
    def pages(self) -> int:
        """Pages in the pool."""
        return len(self._ids)

    @property
    def free_pages(self) -> int:
        """Pages on the free list."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Takes `count` pages, all or none: None if fewer are free."""
        if count < 0:
            raise ValueError(f"cannot allocate {count} pages")
        if count > len(self._free):
            return None
        page_ids = [self._free.pop() for _ in range(count)]
        for page_id in page_ids:
            self._taken[page_id] = True
        return page_ids

    def free(self, page_ids: Sequence[int]) -> None:
        """Takes pages back. Raises ValueError, and takes none, if one is foreign or free."""
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
        """Pages that are kept away."""
        return len(self._quarantined)

    def quarantine(self, page_ids: Sequence[int]) -> None:
        """Takes back pages whose entries gave something that is no number, and hands them out no
        more: until they are absolved, or more than a part of the pool is away. The oldest are used
        again then: a page is written before it is read."""
        self._quarantined.extend(page_ids)
        while len(self._quarantined) > self.most_quarantined:
            self.free([self._quarantined.popleft()])

    def absolve(self, page_ids: Sequence[int]) -> None:
        """They were not to blame; those that are away are handed out again."""
        for page_id in page_ids:
            if page_id in self._quarantined:
                self._quarantined.remove(page_id)
                self.free([page_id])

    def check_integrity(self, owned: Iterable[Sequence[int]]) -> None:
        """Raises RuntimeError unless every page is free, or owned by exactly one sequence.

        Args:
          owned: the pages of every sequence, one list each.
        """
        claims = Counter(self._free)
        claims.update(self._quarantined)
        if any(self._taken[page_id] for page_id in self._free):
            raise RuntimeError("a page is on the free list and marked as taken")
        for page_ids in owned:
            claims.update(page_ids)
        unclaimed = [page_id for page_id in self._ids if not claims[page_id]]
        contested = [page_id for page_id, times in claims.items() if times > 1]
        foreign = [page_id for page_id in claims if page_id not in self._ids]
        if unclaimed or contested or foreign:
            raise RuntimeError(
                f"page pool of {self.pages}: lost pages {unclaimed}, pages claimed more than once "
                f"{contested}, foreign pages {foreign}"
            )


class RingPool(PageAllocator):
    """Pages of layers with a window, which read only the last pages of a sequence: its ring.

    Args:
      pages, first: as of `PageAllocator`.
      window: tokens that a token sees, itself included.
      page_size: tokens a page.
    """

    def __init__(self, pages: int, first: int, window: int, page_size: int):
        super().__init__(pages, first)
        self._window, self._page_size = window, page_size
        self.window_pages = pages_for(window, page_size)
        """Pages that a window fills."""

    def first_read(self, tokens: int) -> int:
        """Returns the place of the first page that a token behind this number of tokens reads."""
        return max(tokens + 1 - self._window, 0) // self._page_size
