"""The bytes of a link's frames: both ends may be of different releases."""

import msgspec
import pytest

from jaxserve.link.remote import frames
from jaxserve.link.session.hello import Refused, make_hello
from jaxserve.link.session.messages import Bulk, Echo

HELLO = make_hello("ffn", {"model": "toy"}, epoch=2, versions={"jax": "0.12.0"})
NOTE = frames.Note(7, 1, "moe", 2, 64, 5, Bulk(4096, 2**32 - 1))


def test_note_is_an_array_of_plain_values() -> None:
    assert msgspec.msgpack.decode(frames.encode(NOTE)) == [
        *("note", 7, 1, "moe", 2, 64, 5, [4096, 4294967295])
    ]


def test_frames_come_back() -> None:
    for frame in (frames.Join(HELLO, "d0", 2, (8, 24)), NOTE, Echo(3)):
        assert frames.decode_from_attention(frames.encode(frame)) == frame
    refused, preparing = Refused("no"), frames.Preparing("24 rows")
    answers = frames.Welcome(HELLO), refused, preparing, frames.Failed(1, "no")
    for answer in (*answers, frames.Result(7, Bulk(64, None)), Echo(3)):
        assert frames.decode_from_ffn(frames.encode(answer)) == answer


@pytest.mark.parametrize(
    "data", [b"", b"\x00", b"\x80", frames.encode(NOTE)[:-1], frames.encode(Refused("no"))]
)
def test_anything_else_is_an_error(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        frames.decode_from_attention(data)
