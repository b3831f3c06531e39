"""Messages that every use of a session shares, and their form: msgpack of structs, nothing pickled.

Each use has a table of its own (`frames.py` beside it). Plain Python; knows nothing of JAX.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import msgspec

from jaxserve.link.session.hello import Hello, Refusal, refusal


class Echo(msgspec.Struct, frozen=True, tag="echo", array_like=True):
    """Sign of life of the end that dialled; the other end returns it."""

    number: int


class Failed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """Tells the other end that it does not get what it asked for with this number."""

    number: int
    text: str
    mismatch: bool = False
    """True if this end holds other data than the other one expects."""


class Bulk(msgspec.Struct, frozen=True, array_like=True):
    """Part of a frame that bytes follow (`link/bulk.py`)."""

    size: int
    """Bytes, padding included."""
    checksum: int | None
    """Checksum of the bytes; None where none was taken (`pages.checksums`)."""
    rows: tuple[bytes, ...] = ()
    """Rows that follow of each array, a bit each; empty: all rows of all arrays."""


class Ready(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    """The bytes that the other end asked for with this number follow."""

    number: int
    bulk: Bulk


class Greeting(msgspec.Struct, frozen=True, array_like=True):
    """First frame of either end."""

    hello: Hello


class Join(Greeting, frozen=True, tag="join"):
    """First frame of an end that dials and says no more than its hello."""


class Refused(msgspec.Struct, frozen=True, tag="refused", array_like=True):
    """The end that listens refuses the other one and closes the connection."""

    reason: str
    later: bool = False
    """Whether it gets ready for the other end, which is to ask again soon."""


encode: Callable[[msgspec.Struct], bytes] = msgspec.msgpack.Encoder().encode


def decoder(*messages: type[msgspec.Struct]) -> msgspec.msgpack.Decoder[Any]:
    """Returns the decoder of a table. It raises msgspec.DecodeError for anything but one of these
    messages, whole and of the right types."""
    return msgspec.msgpack.Decoder(functools.reduce(operator.or_, messages))


def greeted[G: Greeting](frame: object, kind: type[G], ours: Hello) -> G:
    """Returns the first frame of the other end.

    Raises:
      Refusal: the other end refuses, its frame is of another kind, or its hello does not fit ours.
    """
    if isinstance(frame, Refused):
        raise Refusal(frame.reason, later=frame.later)
    if not isinstance(frame, kind):
        raise Refusal(f"unexpected {type(frame).__name__} instead of a {kind.__name__.lower()}")
    if reason := refusal(ours, frame.hello):
        raise Refusal(reason)
    return frame
