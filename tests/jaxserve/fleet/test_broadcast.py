import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxserve.fleet import broadcast
from jaxserve.fleet.broadcast import Broadcaster
from jaxserve.fleet.subscription import Subscription
from jaxserve.link.session.channel import Channel, accept, split_address

TOKEN = "a secret"


@contextlib.contextmanager
def broadcaster(host: str = "127.0.0.1") -> Iterator[tuple[Broadcaster, str]]:
    sender = Broadcaster(TOKEN)
    port = sender.listen(host)
    try:
        yield sender, f"127.0.0.1:{port}"
    finally:
        sender.close()


def _first(received: Iterator[bytes | None], count: int) -> list[bytes]:
    return list(itertools.islice((one for one in received if one is not None), count))


@pytest.mark.parametrize("host", ["127.0.0.1", "[::]", "localhost", "0.0.0.0"])
def test_all_get_all_messages_in_order(host: str) -> None:
    messages = [bytes([number]) * 1000 * number for number in range(100)]
    with broadcaster(host) as (sender, address):
        subscriptions = [Subscription(address, TOKEN, 5.0) for _ in range(3)]
        for message in messages:
            sender.send(message)
        for subscription in subscriptions:
            assert _first(subscription.messages(), 100) == messages


def test_the_end_of_the_sender_is_the_end_of_the_messages() -> None:
    with broadcaster() as (sender, address):
        subscription = Subscription(address, TOKEN, 5.0)
        sender.send(b"last")
        sender.close()
        assert list(subscription.messages()) == [b"last"]


def test_silence_is_said_and_a_subscription_can_be_closed_from_elsewhere() -> None:
    with broadcaster() as (_, address):
        messages = (subscription := Subscription(address, TOKEN, 5.0)).messages()
        started = time.monotonic()
        assert next(messages) is None
        assert 0.4 < time.monotonic() - started < 5
        threading.Timer(0.1, subscription.close).start()
        assert [message for message in messages if message is not None] == []


def test_strangers_get_nothing() -> None:
    with broadcaster() as (sender, address):
        with pytest.raises(OSError, match=f"another token than that of {address}"):
            Subscription(address, "guess", 5.0)
        known = Subscription(address, TOKEN, 5.0)
        sender.send(b"x")
        assert _first(known.messages(), 1) == [b"x"]
        known.close()


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
    monkeypatch.setattr(broadcast, "_HELLO_SECONDS", 0.6)
    with broadcaster() as (_, address):
        with socket.create_connection(split_address(address), 5.0) as stranger:
            assert b"#CHALLENGE#" in stranger.recv(256)
            started = time.monotonic()
            assert _is_closed(stranger)
            assert time.monotonic() - started < 3


def serve_one(serve: Callable[[Channel], None]) -> str:
    """Starts a sender that knows the token and serves one connection; returns its address."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        with listener:
            channel = accept(listener.accept()[0], TOKEN, 5.0)
        serve(channel)
        channel.close()

    threading.Thread(target=run, daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    ("said", "error"), [(b"welcome", "another protocol"), (None, "it closed the connection")]
)
def test_who_knows_the_token_and_is_no_broadcaster(said: bytes | None, error: str) -> None:
    def serve(channel: Channel) -> None:
        if said is not None:
            channel.send(said)

    with pytest.raises(OSError, match=error):
        Subscription(serve_one(serve), TOKEN, 5.0)


def test_a_name_is_every_address_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them, as of Debian's 127.0.1.1 beside that of the network, is not where others come
    to."""
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
    with broadcaster(name) as (sender, address):
        subscription = Subscription(address, TOKEN, 5.0)
        sender.send(b"x")
        assert _first(subscription.messages(), 1) == [b"x"]


def test_nobody_there_is_an_error() -> None:
    with broadcaster() as (sender, address):
        sender.close()
        with pytest.raises(OSError, match="refused"):
            Subscription(address, TOKEN, 5.0)


def test_who_does_not_read_delays_nobody_and_gets_everything_later() -> None:
    """64 MB, more than the buffers of a connection hold."""
    messages = [bytes([number]) * (1 << 20) for number in range(64)]
    with broadcaster() as (sender, address):
        slow, quick = (Subscription(address, TOKEN, 5.0) for _ in range(2))
        found: list[bytes] = []
        reader = threading.Thread(target=lambda: found.extend(_first(quick.messages(), 65)))
        reader.start()
        for message in messages:
            sender.send(message)
        sender.send(b"after")
        reader.join(60.0)
        assert found == [*messages, b"after"]
        received = slow.messages()
        assert _first(received, 65) == [*messages, b"after"]
        sender.send(b"again")
        assert _first(received, 1) == [b"again"]


def test_who_is_gone_is_left_out() -> None:
    with broadcaster() as (sender, address):
        gone, here = (Subscription(address, TOKEN, 5.0) for _ in range(2))
        list(zip(range(1), gone.messages(), strict=False))
        gone.close()
        for number in range(100):
            sender.send(bytes([number]) * 100_000)
        assert _first(here.messages(), 100)[-1] == bytes([99]) * 100_000
