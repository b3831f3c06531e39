import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve.fleet import follower
from jaxserve.fleet.control import Accepted, Register
from jaxserve.fleet.follower import Relay, _Source
from jaxserve.link.session.channel import AuthenticationError, Channel, dial, split_address
from jaxserve.link.session.greet import greet
from jaxserve.link.session.hello import Refusal
from tests.jaxserve.fleet.ends import TOKEN, identity
from tests.jaxserve.waiting import until


@contextlib.contextmanager
def relay(host: str = "127.0.0.1") -> Iterator[tuple[Relay, str]]:
    sender = Relay(identity(1, 4), TOKEN)
    port = sender.listen(host)
    try:
        yield sender, f"127.0.0.1:{port}"
    finally:
        sender.close()


@contextlib.contextmanager
def subscribed(sender: Relay, address: str, **changes: object) -> Iterator[Channel]:
    """A process below it, once it gets what is for all."""
    there, register = len(sender.below), Register(identity(2, 4, **changes))
    channel = greeted(dial(address, TOKEN, 5.0), register)
    until(lambda: len(sender.below) > there)
    yield channel
    channel.close()


def greeted(channel: Channel, register: Register) -> Channel:
    greet(channel, register, Accepted, _Source.decode, 5.0)
    return channel


@pytest.mark.parametrize("host", ["127.0.0.1", "[::]", "localhost", "0.0.0.0"])
def test_all_get_all_messages_in_order(host: str) -> None:
    messages = [bytes([number]) * 1000 * number for number in range(100)]
    with relay(host) as (sender, address), contextlib.ExitStack() as stack:
        channels = [stack.enter_context(subscribed(sender, address)) for _ in range(3)]
        for message in messages:
            sender.post(message)
        for channel in channels:
            assert [channel.receive() for _ in messages] == messages


def test_the_end_of_the_sender_is_the_end_of_the_messages() -> None:
    with relay() as (sender, address), subscribed(sender, address) as channel:
        sender.post(b"last")
        sender.close()
        assert channel.receive() == b"last"
        with pytest.raises(EOFError):
            channel.receive()


def test_strangers_get_nothing() -> None:
    with relay() as (sender, address):
        with pytest.raises(AuthenticationError, match=f"another token than that of {address}"):
            dial(address, "guess", 5.0)
        with pytest.raises(Refusal, match="lanes = 3, here 2"):
            greeted(
                dial(address, TOKEN, 5.0),
                Register(identity(2, 4, digest="d2", facts={"lanes": "3", "attention.dp": "1"})),
            )
        assert not sender.below
        with subscribed(sender, address) as known:
            sender.post(b"x")
            assert known.receive() == b"x"


def _is_closed(stranger: socket.socket) -> bool:
    """Whether the other end closes a connection that brings a byte every 0.2 s."""
    stranger.settimeout(0.2)
    for _ in range(31):
        try:
            stranger.sendall(b"x")
            if not stranger.recv(1):
                return True
        except TimeoutError:
            pass
        except ConnectionError:
            return True
    return False


def test_a_stranger_that_drips_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is that of all bytes, not of each."""
    monkeypatch.setattr(follower, "HELLO_SECONDS", 0.6)
    with relay() as (_, address):
        with socket.create_connection(split_address(address), 5.0) as stranger:
            assert b"#CHALLENGE#" in stranger.recv(256)
            started = time.monotonic()
            assert _is_closed(stranger)
            assert time.monotonic() - started < 3


def test_a_name_is_every_address_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's 127.0.1.1, beside the network's address, is not where others come to."""
    name, real = "many.example", socket.create_server

    def first_only(address: tuple[str, int], **options: Any) -> socket.socket:
        host, port = address
        if host == name:
            host, options = "127.0.0.2", {}
        return real((host, port), **options)

    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.2", 0))]
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda h, *a, **k: found if h == name else resolve(h, *a, **k)
    )
    monkeypatch.setattr(socket, "create_server", first_only)
    with relay(name) as (sender, address), subscribed(sender, address) as channel:
        sender.post(b"x")
        assert channel.receive() == b"x"


def test_who_does_not_read_delays_nobody_and_gets_everything_later() -> None:
    """64 MB, more than the buffers of a connection hold."""
    messages = [*(bytes([number]) * (1 << 20) for number in range(64)), b"after"]
    with (
        relay() as (sender, address),
        subscribed(sender, address) as slow,
        subscribed(sender, address) as quick,
    ):
        found: list[bytes] = []
        reader = threading.Thread(target=lambda: found.extend(quick.receive() for _ in messages))
        reader.start()
        for message in messages:
            sender.post(message)
        reader.join(60.0)
        assert found == messages
        assert [slow.receive() for _ in messages] == messages
        sender.post(b"again")
        assert slow.receive() == b"again"


def test_who_is_gone_is_left_out() -> None:
    with relay() as (sender, address), subscribed(sender, address) as here:
        with subscribed(sender, address):
            pass
        until(lambda: sender.below[1].failure is not None)
        for number in range(100):
            sender.post(bytes([number]) * 100_000)
        assert [here.receive()[0] for _ in range(100)] == list(range(100))
