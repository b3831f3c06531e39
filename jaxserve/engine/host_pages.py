"""Store of KV pages in host memory, found by keys: the bookkeeping, which copies nothing.

Used by `page_tier.py` on the engine's thread. Another thread fills `HostPage.rows` in.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np


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
