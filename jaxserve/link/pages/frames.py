"""Messages of a pages link, and orders and pieces between an engine and its end of the link: that
of a prefill worker (`server.py`) or of a domain (`client.py`).

The KV entries pass on the same channel, piece by piece: `Ready` announces the bytes of a piece,
which follow it as `link/bulk.py` lays them out. `Ready` has the checksum of the piece: a connection
on which it is wrong is given up.

    decode → prefill   Join      (Fetch | Renew | Release | Echo)*
    prefill → decode   Welcome   (Ready bytes | Failed | Echo)*               or Refused
"""

import hashlib
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import msgspec
import numpy as np

from jaxserve.link.pages.source import PagesSource
from jaxserve.link.session.messages import Greeting


class Welcome(Greeting, frozen=True, tag="welcome"):
    """The prefill worker takes the decode worker in."""


class Fetch(msgspec.Struct, frozen=True, tag="fetch", array_like=True):
    """Asks for the tokens from `start` on as a piece, which may be padded behind `stop`."""

    number: int
    """Names the fetch on this connection."""
    hand_off: str
    start: int
    stop: int
    size: int
    """Tokens of the piece, padding included."""
    digest: str
    epoch: int


class Renew(msgspec.Struct, frozen=True, tag="renew", array_like=True):
    """Asks to keep these leases."""

    hand_offs: list[str]


class Release(msgspec.Struct, frozen=True, tag="release", array_like=True):
    """Gives this lease up."""

    hand_off: str


CACHE_FORMAT = "cache.format"
"""Key of the pieces' format in hellos: the prefill worker wants its own, and a domain takes it if
it knows it."""


def pages_digest(token_ids: Sequence[int], model: str, cache_format: str) -> str:
    """Returns sixteen hexadecimal digits that stand for held pages.

    Args:
      token_ids: whose entries are held.
      model: digest of the facts both ends must share.
      cache_format: of the prefill worker's pages.
    """
    digest = hashlib.blake2s(f"{model} {cache_format} {len(token_ids)} ".encode(), digest_size=8)
    digest.update(np.asarray(token_ids, "<i4").tobytes())
    return digest.hexdigest()


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
