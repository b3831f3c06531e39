"""Data that passes between an engine and its end of a pages link: orders and pieces.

An engine is handed the end of a prefill worker (`server.py`) or of a domain (`client.py`).
"""

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax

from jaxserve.link.pages.source import PagesSource

Piece = Sequence[jax.Array]
"""The wire arrays of a piece, each on one device."""


class PagesError(Exception):
    """Held pages cannot be handed out, or fetched, for another reason than the connection.

    Args:
      text: the reason.
      mismatch: whether the lease holds other tokens than those asked for.
    """

    def __init__(self, text: str, *, mismatch: bool = False):
        super().__init__(text)
        self.mismatch = mismatch


class FetchedPiece(NamedTuple):
    """A piece that has arrived whole, on the devices that `Landing` asked for."""

    tokens: int
    """Tokens of the piece, padding included."""
    cache_format: str
    arrays: Sequence[jax.Array]
    done: Callable[[], object]
    """The receiver calls this once it has written the piece; until then few others are fetched."""


@dataclass(eq=False)
class FetchJob:
    """A fetch of the pages of a token range.

    Attributes:
      key: names the fetch for `cancel`.
      source: where the pages are.
      token_ids: all tokens that the source claims to hold, for comparison.
      start, stop: range of the wanted tokens.
      group: DP group on whose devices the pages land.
      on_piece: takes a piece's first token, its number of tokens (without padding) and the piece.
      on_failure: takes the reason why the rest does not come, and whether the source holds other
        tokens. No callback follows it or the last piece.
    """

    key: Hashable
    source: PagesSource
    token_ids: Sequence[int]
    start: int
    stop: int
    group: int
    on_piece: Callable[[int, int, FetchedPiece], None]
    on_failure: Callable[[str, bool], None]
    cancelled: bool = False
    attempts: int = 0
    queued: float = field(default_factory=time.monotonic)
