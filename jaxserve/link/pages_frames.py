"""The frames of a pages link's channel: msgpack of the structs below, nothing pickled.

The KV entries pass on the same channel, piece by piece: `Ready` announces the bytes of a piece,
which follow it as `pages_bytes.py` lays them out.

    decode → prefill   Join      (Fetch | Renew | Release | Echo)*
    prefill → decode   Welcome   (Ready bytes | Failed | Echo)*               or Refused
"""

from collections.abc import Callable

import msgspec

from jaxserve.link.frames import Echo, Refused
from jaxserve.link.hello import Hello


class Join(msgspec.Struct, frozen=True, tag="join", array_like=True):
    """First frame of a decode worker."""

    hello: Hello


class Welcome(msgspec.Struct, frozen=True, tag="welcome", array_like=True):
    """The prefill worker takes it in."""

    hello: Hello
    cache_format: str
    """Format of the pieces."""


class Fetch(msgspec.Struct, frozen=True, tag="fetch", array_like=True):
    """Wants the tokens from `start` on as a piece, which may be padded behind `stop`."""

    number: int
    """Names the fetch on this connection."""
    hand_off: str
    start: int
    stop: int
    size: int
    """Tokens of the piece, padding included."""
    digest: str
    epoch: int


class Ready(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    """The piece follows."""

    number: int
    size: int
    """Size of the piece in bytes."""


class Failed(msgspec.Struct, frozen=True, tag="unready", array_like=True):
    """The piece will not come."""

    number: int
    text: str
    mismatch: bool
    """Whether what is held is something else than what was asked for."""


class Renew(msgspec.Struct, frozen=True, tag="renew", array_like=True):
    """These leases are still wanted."""

    hand_offs: list[str]


class Release(msgspec.Struct, frozen=True, tag="release", array_like=True):
    """This lease is not."""

    hand_off: str


FromDecode = Join | Fetch | Renew | Release | Echo
FromPrefill = Welcome | Refused | Ready | Failed | Echo

encode: Callable[[msgspec.Struct], bytes] = msgspec.msgpack.Encoder().encode
_decode_decoder = msgspec.msgpack.Decoder(FromDecode)
_prefill_decoder = msgspec.msgpack.Decoder(FromPrefill)


def decode_from_decode(data: bytes) -> FromDecode:
    """Raises msgspec.DecodeError for anything but such a frame."""
    return _decode_decoder.decode(data)


def decode_from_prefill(data: bytes) -> FromPrefill:
    """Raises msgspec.DecodeError for anything but such a frame."""
    return _prefill_decoder.decode(data)
