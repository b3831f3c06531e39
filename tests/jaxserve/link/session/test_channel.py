"""Addresses, tokens and framing over real sockets, without JAX."""

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError
from multiprocessing.connection import answer_challenge

import pytest

from jaxserve.errors import ConfigError
from jaxserve.link.session import channel as channels


@pytest.fixture
def listener():
    with channels.listen("127.0.0.1:0", "secret") as sock:
        yield sock


@pytest.fixture
def accept_one(listener):
    """Accepts a connection in a thread: a future of the channel."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda seconds=5.0: pool.submit(
            lambda: channels.accept(listener.accept()[0], "secret", seconds)
        )


def address(listener: socket.socket) -> str:
    return channels.join_address(*listener.getsockname())


def dial_with(listener: socket.socket, token: str) -> channels.Channel:
    channel = channels.dial(address(listener), 5.0)
    try:
        channel.authenticate(token, accepted=False)
    except AuthenticationError:
        channel.close()
        raise
    return channel


@pytest.fixture
def ends(listener, accept_one):
    """Both ends of a connection."""
    accepted = accept_one()
    client = dial_with(listener, "secret")
    server = accepted.result()
    yield client, server
    client.close()
    server.close()


def test_frames_keep_their_bounds_and_order(ends) -> None:
    client, server = ends
    for frame in (b"one", b"", b"x" * 100_000):
        client.send(frame)
    assert [server.receive() for _ in range(3)] == [b"one", b"", b"x" * 100_000]
    assert not server.wait(0.0)
    server.send(b"back")
    assert client.wait(5.0)
    assert client.receive() == b"back"
    client.close()
    assert server.wait(5.0)
    with pytest.raises((EOFError, OSError)):
        server.receive()


def test_a_detached_socket_has_the_same_frames(ends) -> None:
    assert channels.framed(b"body") == b"\x00\x00\x00\x04body"
    client, server = ends
    with client.detach() as sock:
        sock.sendall(channels.framed(b"one") + channels.framed(b""))
        assert [server.receive() for _ in range(2)] == [b"one", b""]
        server.send(b"three")
        server.close()
        assert sock.recv(100, socket.MSG_WAITALL) == b"\x00\x00\x00\x05three"


def test_frames_are_taken_once_they_are_whole() -> None:
    received = bytearray(b"\0\0\0\x02ab\0\0\0\0\0\0\0\x03xy")
    assert channels.take_frames(received, 3) == [b"ab", b""]
    assert received == b"\0\0\0\x03xy"
    assert channels.take_frames(received, 3) == []
    received += b"z\0\0"
    assert channels.take_frames(received, 3) == [b"xyz"]
    assert received == b"\0\0"


@pytest.mark.parametrize(
    ("head", "length"), [(b"\0\0\0\x04", 4), (b"\xff\xff\xff\xff", -1), (b"\0\x10\0\0", 1048576)]
)
def test_a_length_beyond_the_cap_is_refused_before_its_bytes(head: bytes, length: int) -> None:
    with pytest.raises(EOFError, match=f"a frame of {length} bytes where 3 are the most"):
        channels.take_frames(bytearray(head), 3)


def test_shutdown_wakes_a_receiver_in_another_thread(ends) -> None:
    client, _ = ends
    threading.Timer(0.1, client.shutdown).start()
    with pytest.raises((EOFError, OSError)):
        client.receive()


def test_frame_beyond_the_cap_is_refused(ends) -> None:
    client, server = ends

    def send() -> None:
        with contextlib.suppress(OSError):  # The other end closes in the middle.
            client.send(b"x" * (1 << 20) + b"x")

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(OSError, match="bad message length"):
        server.receive()
    server.close()
    client.shutdown()
    sender.join()


def test_another_token_is_refused_by_both_ends(listener, accept_one) -> None:
    accepted = accept_one()
    with pytest.raises(AuthenticationError, match="another token than that of 127"):
        dial_with(listener, "guess")
    assert isinstance(accepted.exception(5.0), AuthenticationError)


def test_a_listener_that_welcomes_everybody_has_to_prove_itself_too(listener) -> None:
    def welcome() -> None:
        impostor = channels.Channel(listener.accept()[0])
        impostor.send(b"#CHALLENGE#{sha256}" + bytes(32))
        impostor.receive()
        impostor.send(b"#WELCOME#")
        with contextlib.suppress(AuthenticationError, EOFError, OSError):
            answer_challenge(impostor._connection, b"guess")
        impostor.close()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(welcome)
        with pytest.raises(AuthenticationError, match="another token than that of 127"):
            dial_with(listener, "secret")


def test_stranger_who_says_nothing_is_cut_off(listener, accept_one) -> None:
    accepted = accept_one(seconds=0.1)
    with socket.create_connection(listener.getsockname()):
        assert isinstance(accepted.exception(5.0), (OSError, EOFError))


def test_address_that_others_reach_needs_a_token() -> None:
    with pytest.raises(
        ConfigError, match=r"0\.0\.0\.0:0: other hosts reach it, so it needs a token"
    ):
        channels.listen("0.0.0.0:0", "")
    channels.listen("127.0.0.1:0", "").close()
    channels.listen("localhost:0", "").close()


def test_taken_port_is_named(listener) -> None:
    with pytest.raises(ConfigError, match="already in use"):
        channels.listen(address(listener), "secret")


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:port", "host:70000"])
def test_bad_addresses_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected host:port"):
        channels.split_address(text)


def test_addresses_of_both_families() -> None:
    assert channels.split_address("[::1]:80") == ("::1", 80)
    assert channels.join_address("::1", 80) == "[::1]:80"
    assert channels.join_address(*channels.split_address("a.example:80")) == "a.example:80"
