"""What passes between an engine and its end of a pages link: orders, pieces and counters.

An engine is handed the end of a prefill worker (`server.py`) or of a domain
(`client.py`).
"""

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import msgspec

from jaxserve.link.pages.source import PagesSource

Piece = Sequence[jax.Array]
"""The wire arrays of a piece, each on one device."""


class ExportError(Exception):
    """Held pages cannot be handed out.

    Args:
      text: why.
      mismatch: whether the lease is of something else than what was asked for.
    """

    def __init__(self, text: str, *, mismatch: bool = False):
        super().__init__(text)
        self.mismatch = mismatch


class ExportCounters(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of a pages server since its start, and its work in hand.

    Attributes:
      transfers: pieces that were sent.
      bytes: of them, padding included.
      failures: pieces that were refused or lost.
      queued: pieces that wait for the engine or for room, or are sent.
      registered_bytes: of pieces that are read or sent.
      connections: open now.
    """

    transfers: int = 0
    bytes: int = 0
    failures: int = 0
    queued: int = 0
    registered_bytes: int = 0
    connections: int = 0


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
    """One fetch.

    Attributes:
      key: names it for `cancel`.
      source: of the pages.
      token_ids: all that the source says it holds, to be compared.
      start, stop: the tokens that are wanted.
      group: DP group for which they land.
      on_piece: takes the first token of a piece, how many it has (without padding) and the piece.
      on_failure: takes why the rest does not come, and whether that is because the source holds
        something else. After the last piece, or after it, nothing is called any more.
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


class FetchCounters(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of a pages client since it was opened, and its work in hand.

    Attributes:
      transfers: fetches that came whole.
      bytes: that came, padding included.
      failures: fetches that did not come whole, those cancelled not counted.
      corrupt: pieces whose checksum was wrong.
      queued: fetches that have not ended.
      wait_seconds: from the order to the last piece, summed over `transfers`.
      connections: open now.
      timed_out: Address of each prefill worker that is left alone for a while → the timeout.
    """

    transfers: int = 0
    bytes: int = 0
    failures: int = 0
    corrupt: int = 0
    queued: int = 0
    wait_seconds: float = 0.0
    connections: int = 0
    timed_out: dict[str, str] = {}
