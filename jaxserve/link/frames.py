"""The frames of a `pull` link's control channel: msgpack of the structs below, nothing pickled.

Arrays do not pass here; they are pulled from transfer servers (`transfers.py`) under the uuids
that these frames name.

    attention → ffn   Join     (Note | Probe | Echo | Question)*
    ffn → attention   Welcome  (Failed | Echo | Answer)*          or Refused or Preparing
"""

from collections.abc import Callable

import msgspec

from jaxserve.link.hello import Hello


class Join(msgspec.Struct, frozen=True, tag="join", array_like=True):
    """First frame of an attention worker."""

    hello: Hello
    domain: str
    transfer_address: str
    """Of the transfer server that serves its messages on this connection."""
    pieces: int = 1
    """Of each of its messages."""
    rows: tuple[int, ...] = ()
    """Of a piece: every number that there will be."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome", array_like=True):
    """The ffn worker takes the attention worker in."""

    hello: Hello
    transfer_address: str
    """Of the transfer server that serves the answers on this connection."""


class Refused(msgspec.Struct, frozen=True, tag="refused", array_like=True):
    """The ffn worker does not, and closes the connection."""

    reason: str


class Preparing(msgspec.Struct, frozen=True, tag="preparing", array_like=True):
    """The ffn worker compiles what this attention worker needs, and closes the connection until
    then."""

    reason: str


class Note(msgspec.Struct, frozen=True, tag="note", array_like=True):
    """A message waits to be pulled under `uuid`; its answer will be under `answer`.

    `rows` are those of a piece: with `kind` and the pieces they fix the shapes of message and
    answer.
    """

    domain: str
    lane: int
    kind: str
    layer: int
    rows: int
    uuid: int
    answer: int
    epoch: int


class Probe(msgspec.Struct, frozen=True, tag="probe", array_like=True):
    """A few kilobytes wait under `uuid` and are to be put under `answer` as they are."""

    uuid: int
    answer: int


class Echo(msgspec.Struct, frozen=True, tag="echo", array_like=True):
    """Sent by the attention worker, and back by the ffn worker: it lives."""

    number: int


class Failed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """The message under `uuid` gets no answer, and the ffn worker closes the connection."""

    uuid: int
    text: str


class Question(msgspec.Struct, frozen=True, tag="question", array_like=True):
    """To the runtime behind the link, which alone knows what it means."""

    number: int
    data: bytes


class Answer(msgspec.Struct, frozen=True, tag="answer", array_like=True):
    """To the question of that number."""

    number: int
    data: bytes = b""
    failed: str = ""
    """Why there is none."""


FromAttention = Join | Note | Probe | Echo | Question
FromFFN = Welcome | Refused | Preparing | Failed | Echo | Answer

encode: Callable[[msgspec.Struct], bytes] = msgspec.msgpack.Encoder().encode
_attention_decoder = msgspec.msgpack.Decoder(FromAttention)
_ffn_decoder = msgspec.msgpack.Decoder(FromFFN)


def decode_from_attention(data: bytes) -> FromAttention:
    """Raises msgspec.DecodeError for anything but such a frame."""
    return _attention_decoder.decode(data)


def decode_from_ffn(data: bytes) -> FromFFN:
    """Raises msgspec.DecodeError for anything but such a frame."""
    return _ffn_decoder.decode(data)
