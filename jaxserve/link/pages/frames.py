"""Messages of a pages link.

The KV entries pass on the same channel, piece by piece: `Ready` announces the bytes of a piece,
which follow it as `link/bulk.py` lays them out. `Ready` has the checksum of the piece: a connection
on which it is wrong is given up.

    decode → prefill   Join      (Fetch | Renew | Release | Echo)*
    prefill → decode   Welcome   (Ready bytes | Failed | Echo)*               or Refused
"""

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np

from jaxserve.link.session.messages import Greeting


class Welcome(Greeting, frozen=True, tag="welcome"):
    """The prefill worker takes the decode worker in."""

    cache_format: str
    """Format of the pieces."""


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
