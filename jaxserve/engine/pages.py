"""The page pool of one DP group: which pages of its KV cache are free.

Called by the scheduler alone, on the leader's host. Pages are ints; the arrays they name live on
the attention mesh and are unknown here.
"""

from collections import Counter
from collections.abc import Iterable, Sequence


class PageAllocator:
    """Hands out pages 0 … pages-1 and takes them back. A page is free or taken, never both."""

    def __init__(self, pages: int):
        if pages < 1:
            raise ValueError(f"a page pool of {pages} pages")
        self._taken = [False] * pages
        self._free = list(reversed(range(pages)))  # a stack: low pages first, freed ones again soon

    @property
    def pages(self) -> int:
        """Pages in the pool."""
        return len(self._taken)

    @property
    def free_pages(self) -> int:
        """Pages on the free list."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """The part of the pool that is taken, 0 … 1."""
        return 1 - len(self._free) / len(self._taken)

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
            if not 0 <= page_id < len(self._taken):
                raise ValueError(f"page {page_id} is not in the pool of {len(self._taken)} pages")
            if times > 1 or not self._taken[page_id]:
                raise ValueError(f"page {page_id} is freed twice")
        for page_id in page_ids:
            self._taken[page_id] = False
        self._free.extend(reversed(page_ids))

    def check_integrity(self, owned: Iterable[Sequence[int]]) -> None:
        """Raises RuntimeError unless every page is free, or owned by exactly one sequence.

        Args:
          owned: the pages of every sequence, one list each.
        """
        claims = Counter(self._free)
        if any(self._taken[page_id] for page_id in claims):
            raise RuntimeError("a page is on the free list and marked as taken")
        for page_ids in owned:
            claims.update(page_ids)
        unclaimed = [page_id for page_id in range(self.pages) if not claims[page_id]]
        contested = [page_id for page_id, times in claims.items() if times > 1]
        foreign = [page_id for page_id in claims if not 0 <= page_id < self.pages]
        if unclaimed or contested or foreign:
            raise RuntimeError(
                f"page pool of {self.pages}: lost pages {unclaimed}, pages claimed more than once "
                f"{contested}, foreign pages {foreign}"
            )
