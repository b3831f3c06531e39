"""The bytes of a control channel: both ends of a link may be of different releases."""

import msgspec
import pytest

from jaxserve.link.remote import frames
from jaxserve.link.session.hello import Refused, make_hello

HELLO = make_hello("ffn", {"model": "toy"}, epoch=2, versions={"jax": "0.12.0"})
NOTE = frames.Note("d0", 1, "moe", 2, 64, 2**63 - 1, 4, 5)


def test_note_is_an_array_of_plain_values() -> None:
    assert msgspec.msgpack.decode(frames.encode(NOTE)) == [
        *("note", "d0", 1, "moe", 2, 64, 9223372036854775807, 4, 5)
    ]


def test_frames_come_back() -> None:
    for frame in (frames.Join(HELLO, "d0", "host:1", 2, (8, 24)), NOTE, frames.Probe(1, 2)):
        assert frames.decode_from_attention(frames.encode(frame)) == frame
    refused, preparing = Refused("no"), frames.Preparing("24 rows")
    answers = frames.Welcome(HELLO, "host:1"), refused, preparing, frames.Failed(1, "no")
    for answer in (*answers, frames.Echo(3)):
        assert frames.decode_from_ffn(frames.encode(answer)) == answer


@pytest.mark.parametrize(
    "data", [b"", b"\x00", b"\x80", frames.encode(NOTE)[:-1], frames.encode(Refused("no"))]
)
def test_anything_else_is_an_error(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        frames.decode_from_attention(data)
