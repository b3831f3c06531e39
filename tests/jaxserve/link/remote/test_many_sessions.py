"""512 attention workers at one ffn worker, which has a few threads for all of them."""

from pathlib import Path

import jax
import numpy as np
import pytest

from jaxserve.link.remote.connection import AnswerShape, MessageConnection, Unanswered
from jaxserve.link.remote.frames import Join
from jaxserve.link.session.channel import Deadlines, dial
from jaxserve.link.session.hello import make_hello
from tests.jaxserve.link.remote import toy_server as toy
from tests.jaxserve.waiting import until

pytestmark = [pytest.mark.nightly, pytest.mark.multihost]

SESSIONS, STOPPED, SLOW = 512, 16, {"probe": 600.0, "down": 600.0}
SHAPE = toy.ROWS, toy.WORDS


def session(address: str, number: int) -> MessageConnection:
    deadlines = Deadlines(**toy.DEADLINES | SLOW)
    made = MessageConnection(dial(address, "secret", 10.0), deadlines, "pull", lambda: 600.0)
    made.join(Join(make_hello("attention", toy.FACTS), f"d{number}", 1, (toy.ROWS,)))
    return made


def exchange(alive: list[MessageConnection], number: int) -> None:
    sent, shape = {}, AnswerShape([jax.ShapeDtypeStruct(SHAPE, np.int32)], lambda pieces: pieces[0])
    packed = jax.device_put(np.full(SHAPE, number, np.int32)).block_until_ready()
    for one in alive:
        words = number, 0, toy.kind_of(1, toy.WORDS), 1, toy.ROWS, packed, shape, [one]
        one.post(sent.setdefault(one, Unanswered(*words)), here=True)
    for one, message in sent.items():
        one.wait_for(message)
        assert one.failure is None
        np.testing.assert_array_equal(message.pieces[0], np.full(SHAPE, 2 * number + 1))


def test_many_sessions_share_few_threads() -> None:
    """Some stop inside a frame, while others go on."""
    with toy.nursery() as toys, toys.servers({"deadlines": SLOW}) as [server]:
        made = [session(server.address, number) for number in range(SESSIONS)]
        exchange(made, 1)
        exchange(made[::2], 2)  # the others are idle
        for one in made[:STOPPED]:
            one._channel._socket.sendall(one._channel._framing.pack(b"half of it")[:11])
        exchange(made[STOPPED:], 3)
        assert len([*Path(f"/proc/{server.pid}/task").iterdir()]) < 64
        for one in made:
            one.close()
        until(lambda: not server.report()[0])
