"""The bytes of a link's frames: both ends may be of different releases."""

import msgspec
import pytest

from jaxserve.link.remote import frames
from jaxserve.link.remote.connection import MessageConnection
from jaxserve.link.remote.server import _DomainConnection
from jaxserve.link.session.hello import make_hello
from jaxserve.link.session.messages import Bulk, Echo, Failed, Ready, Refused, encode

HELLO = make_hello("ffn", {"model": "toy"})
NOTE = frames.Note(7, 1, "moe", 2, 64, Bulk(4096, 2**32 - 1))


def test_frames_come_back_and_a_note_is_an_array_of_plain_values() -> None:
    assert msgspec.msgpack.decode(encode(NOTE)) == [
        "note",
        7,
        1,
        "moe",
        2,
        64,
        [4096, 4294967295, []],
    ]
    for frame in (frames.Join(HELLO, "d0", 2, (8, 24), (1,)), NOTE, Echo(3)):
        assert _DomainConnection.decode(encode(frame)) == frame
    answers = frames.Welcome(HELLO), Refused("24 rows", True), Failed(1, "no"), Echo(3)
    for answer in (*answers, Ready(7, Bulk(64, None))):
        assert MessageConnection.decode(encode(answer)) == answer


@pytest.mark.parametrize("data", [b"", b"\x00", b"\x80", encode(NOTE)[:-1], encode(Failed(1, ""))])
def test_anything_else_is_an_error(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        _DomainConnection.decode(data)
