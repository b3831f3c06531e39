"""The frames of a pages link's control channel: msgpack of the structs below, nothing pickled.

KV entries do not pass here; they are pulled from the transfer server of the prefill worker, piece
by piece, under the uuids that `Ready` names.

    decode → prefill   Join      (Fetch | Taken | Renew | Release | Echo)*
    prefill → decode   Welcome   (Ready | Failed | Echo)*                     or Refused
"""

from collections.abc import Callable

import msgspec

from jaxserve.link.frames import Echo, Refused
from jaxserve.link.hello import Hello


class Join(msgspec.Struct, frozen=True, tag="join", array_like=True):
    """First frame of a decode worker."""

    hello: Hello
    transfer_address: str


class Welcome(msgspec.Struct, frozen=True, tag="welcome", array_like=True):
    """The prefill worker takes it in."""

    hello: Hello
    transfer_address: str
    """Of the transfer server that serves the pieces on this connection."""
    cache_format: str
    """Of the pieces."""


class Fetch(msgspec.Struct, frozen=True, tag="fetch", array_like=True):
    """Wants the tokens from `start` on, in pieces of these sizes, the last of which may be padded
    behind `stop`."""

    number: int
    """Names the fetch on this connection."""
    hand_off: str
    start: int
    stop: int
    pieces: list[int]
    digest: str
    epoch: int


class Ready(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    """The pieces wait to be pulled, each under its uuid."""

    number: int
    uuids: list[int]


class Failed(msgspec.Struct, frozen=True, tag="unready", array_like=True):
    """They do not."""

    number: int
    text: str
    mismatch: bool
    """Whether what is held is something else than what was asked for."""


class Taken(msgspec.Struct, frozen=True, tag="taken", array_like=True):
    """The pieces of a fetch have been pulled, or nobody wants them: their memory is free."""

    number: int


class Renew(msgspec.Struct, frozen=True, tag="renew", array_like=True):
    """These leases are still wanted."""

    hand_offs: list[str]


class Release(msgspec.Struct, frozen=True, tag="release", array_like=True):
    """This lease is not."""

    hand_off: str


FromDecode = Join | Fetch | Taken | Renew | Release | Echo
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
