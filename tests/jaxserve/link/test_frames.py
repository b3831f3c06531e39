"""The bytes of a control channel: both ends of a link may be of different releases."""

import msgspec
import pytest

from jaxserve.link.frames import (
    Echo,
    Failed,
    Join,
    Note,
    Preparing,
    Probe,
    Refused,
    Welcome,
    decode_from_attention,
    decode_from_ffn,
    encode,
)
from jaxserve.link.hello import make_hello

HELLO = make_hello("ffn", {"model": "toy"}, epoch=2, versions={"jax": "0.12.0"})
NOTE = Note("d0", 1, "moe", 2, 64, 2**63 - 1, 4, 5)


def test_note_is_an_array_of_plain_values() -> None:
    assert msgspec.msgpack.decode(encode(NOTE)) == [
        *("note", "d0", 1, "moe", 2, 64, 9223372036854775807, 4, 5)
    ]


@pytest.mark.parametrize(
    "frame", [Join(HELLO, "d0", "host:1", 2, (8, 24)), NOTE, Probe(1, 2), Echo(3)]
)
def test_frames_of_attention_workers_come_back(frame) -> None:
    assert decode_from_attention(encode(frame)) == frame


@pytest.mark.parametrize(
    "frame",
    [Welcome(HELLO, "host:1"), Refused("no"), Preparing("24 rows"), Failed(1, "no"), Echo(3)],
)
def test_frames_of_ffn_workers_come_back(frame) -> None:
    assert decode_from_ffn(encode(frame)) == frame


@pytest.mark.parametrize("data", [b"", b"\x00", b"\x80", encode(NOTE)[:-1], encode(Refused("no"))])
def test_anything_else_is_an_error(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_from_attention(data)
