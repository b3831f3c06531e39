"""A listener and its connections: strangers, too many peers, and the end."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from jaxserve.link.session import channel as channel_module
from jaxserve.link.session import listener as listener_module
from jaxserve.link.session.channel import Channel, dial, split_address
from jaxserve.link.session.listener import Listener, listen
from tests.jaxserve.waiting import until

TOKEN = "secret"
SECONDS = 10.0
ENDS: list[Channel] = []


@pytest.fixture(autouse=True)
def closed_ends() -> Iterator[None]:
    yield
    while ENDS:
        ENDS.pop().close()


def echo(channel: Channel) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            channel.send(channel.receive())
    channel.close()


@contextlib.contextmanager
def listening(most: int = 4, seconds: float = SECONDS) -> Iterator[tuple[Listener, str]]:
    made = Listener("test", TOKEN, echo, most=most, seconds=seconds)
    address = made.start(listen("127.0.0.1:0", TOKEN))
    try:
        yield made, address
    finally:
        made.close(SECONDS)
        made.close(SECONDS)
        assert not made._threads


def peer(address: str) -> Channel:
    channel = dial(address, TOKEN, SECONDS)
    ENDS.append(channel)
    return channel


def answers(channel: Channel) -> bool:
    try:
        channel.send(b"x")
        return channel.wait(SECONDS) and channel.receive() == b"x"
    except (EOFError, OSError):
        return False


def is_closed(stranger: socket.socket) -> bool:
    stranger.settimeout(0.0)
    try:
        while stranger.recv(256):  # the challenge comes first
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


def test_strangers_make_room_for_each_other_and_for_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "MOST_HANDSHAKES", 3)
    monkeypatch.setattr(channel_module, "RECEIVE_SECONDS", 60)
    with listening(seconds=60.0) as (_, address), contextlib.ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection(split_address(address), SECONDS))
            for _ in range(8)
        ]
        for _ in range(5):
            known = peer(address)
            assert answers(known)
            known.close()
        until(lambda: sum(map(is_closed, strangers)) >= 5)
        assert not all(map(is_closed, strangers))


def test_strangers_do_not_count_as_peers_and_peers_are_capped() -> None:
    with listening(most=2) as (made, address), contextlib.ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(socket.create_connection(split_address(address), SECONDS))
        first = peer(address)
        assert answers(first)
        assert answers(second := peer(address))
        assert not answers(peer(address))
        first.close()
        until(lambda: len(made._threads) < 2)
        assert answers(peer(address))
        assert answers(second)


def test_a_defect_of_one_connection_ends_that_one(caplog: pytest.LogCaptureFixture) -> None:
    def serve(channel: Channel) -> None:
        channel.close()
        raise KeyError("a defect")

    made = Listener("test", TOKEN, serve, most=4, seconds=SECONDS)
    address = made.start(listen("127.0.0.1:0", TOKEN))
    for _ in range(2):
        assert not answers(peer(address))
    made.close(SECONDS)
    assert not made._threads
    assert caplog.text.count("KeyError: 'a defect'") == 2


def test_no_thread_and_no_descriptor_stays() -> None:
    before = threading.active_count()
    with listening(seconds=0.1) as (_, address):
        stranger = socket.create_connection(split_address(address), SECONDS)
        known = peer(address)
        assert answers(known)
        until(lambda: is_closed(stranger))
        stranger.close()
    known.close()
    until(lambda: threading.active_count() <= before)
    Listener("test", TOKEN, echo, most=1, seconds=1.0).close(1.0)  # before it is started
