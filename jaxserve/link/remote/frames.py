"""Frames of the control channel between runtimes: msgpack of the structs below, nothing pickled.

Arrays do not pass here; they are pulled from transfer servers (`link/transports/pull.py`) under the
uuids that these frames name.

    attention → ffn   Join     (Note | Probe | Echo | Question)*
    ffn → attention   Welcome  (Failed | Echo | Answer)*          or Refused or Preparing
"""

from collections.abc import Callable

import msgspec

from jaxserve.link.session.hello import Greeting, Refused


class Join(Greeting, frozen=True, tag="join"):
    """First frame of an attention worker."""

    domain: str
    transfer_address: str
    """Address of the transfer server that serves the worker's messages on this connection."""
    pieces: int = 1
    """Pieces of each message."""
    rows: tuple[int, ...] = ()
    """All numbers of rows that a piece may have."""


class Welcome(Greeting, frozen=True, tag="welcome"):
    """The ffn worker takes the attention worker in."""

    transfer_address: str
    """Address of the transfer server that serves the answers on this connection."""


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
    """Sign of life: sent by the attention worker, and returned by the ffn worker."""

    number: int


class Failed(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """The message under `uuid` gets no answer, and the ffn worker closes the connection."""

    uuid: int
    text: str


class Question(msgspec.Struct, frozen=True, tag="question", array_like=True):
    """Question to the runtime behind the link, which alone knows its meaning."""

    number: int
    data: bytes


class Answer(msgspec.Struct, frozen=True, tag="answer", array_like=True):
    """Answer to the question with this number."""

    number: int
    data: bytes = b""
    failed: str = ""
    """Reason for the lack of an answer; empty: `data` is the answer."""


FromAttention = Join | Note | Probe | Echo | Question
FromFFN = Welcome | Refused | Preparing | Failed | Echo | Answer

encode: Callable[[msgspec.Struct], bytes] = msgspec.msgpack.Encoder().encode
decode_from_attention = msgspec.msgpack.Decoder(FromAttention).decode
decode_from_ffn = msgspec.msgpack.Decoder(FromFFN).decode
"""Decoders; they raise msgspec.DecodeError for anything but such a frame."""
