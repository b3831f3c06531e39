"""Addresses, tokens and framing over real sockets, without JAX."""

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge

import pytest

from jaxserve.errors import ConfigError
from jaxserve.link.session import channel as channels
from jaxserve.link.session.listener import listen


@pytest.fixture
def listener():
    with listen("127.0.0.1:0", "secret") as sock:
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
    return channels.dial(address(listener), token, 5.0)


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
    with pytest.raises((EOFError, OSError)):
        server.receive()


def test_frames_that_have_come_are_taken_without_waiting(ends) -> None:
    client, server = ends
    assert client.take() == []
    server.send(b"zero", [memoryview(b"rows")])
    server.send(b"half")
    assert client.receive() == b"zero"
    client.receive_into(memoryview(rows := bytearray(4)), 5.0)
    assert rows == b"rows"
    assert client.wait(5.0)
    assert client.take() == [b"half"]
    server.send(b"x" * 200_000)
    taken: list[bytes] = []
    while not taken:
        taken = client.take()
    assert taken == [b"x" * 200_000]
    server.close()
    assert client._poll.poll(5000)
    with pytest.raises(EOFError):
        client.take()


def test_frames_are_taken_once_they_are_whole() -> None:
    sender, receiver = channels.Framing(), channels.Framing(3)
    frames = [sender.pack(body) for body in (b"ab", b"", b"xyz")]
    assert frames[0] == b"\0\0\0\x02\0\0\0\0\xab\x4f\x23\xcdab"
    received = bytearray(frames[0] + frames[1] + frames[2][:-1])
    assert [receiver.next(received) for _ in range(3)] == [b"ab", b"", None]
    assert received == frames[2][:-1]
    received += frames[2][-1:] + b"\0\0"
    assert receiver.next(received) == b"xyz"
    assert received == b"\0\0"


@pytest.mark.parametrize("length", [4, 1 << 20, 0xFFFFFFFF])
def test_a_length_beyond_the_cap_is_refused_before_its_bytes(length: int) -> None:
    head = bytearray(length.to_bytes(4) + bytes(8))
    with pytest.raises(EOFError, match=f"a frame of {length} bytes where 3 are the most"):
        channels.Framing(3).next(head)


def test_every_changed_bit_of_a_frame_is_noticed() -> None:
    frame = channels.Framing().pack(b"a token")
    for bit in range(8 * len(frame)):
        changed = bytearray(frame)
        changed[bit // 8] ^= 1 << bit % 8
        receiver = channels.Framing(100)
        with pytest.raises((OSError, EOFError), match=r"was changed|where 100 are the most"):
            receiver.next(changed + bytes(100))


def test_a_lost_and_a_repeated_frame_are_noticed(ends) -> None:
    client, server = ends
    framing = channels.Framing()
    first, second, third = (framing.pack(body) for body in (b"1", b"2", b"3"))
    client._socket.sendall(first + third)
    assert server.receive() == b"1"
    with pytest.raises(OSError, match="frame 1 was changed, lost or repeated"):
        server.receive()
    receiver, received = channels.Framing(), bytearray(first + second + second)
    assert [receiver.next(received) for _ in range(2)] == [b"1", b"2"]
    with pytest.raises(OSError, match="frame 2 was changed, lost or repeated"):
        receiver.next(received)


def test_shutdown_wakes_a_receiver_in_another_thread(ends) -> None:
    client, _ = ends
    threading.Timer(0.1, client.shutdown).start()
    with pytest.raises((EOFError, OSError)):
        client.receive()


def test_another_token_is_refused_by_both_ends(listener, accept_one) -> None:
    accepted = accept_one()
    with pytest.raises(AuthenticationError, match="another token than that of 127"):
        dial_with(listener, "guess")
    assert isinstance(accepted.exception(5.0), AuthenticationError)


def test_a_listener_that_welcomes_everybody_has_to_prove_itself_too(listener) -> None:
    def welcome() -> None:
        with Connection(listener.accept()[0].detach()) as impostor:
            impostor.send_bytes(b"#CHALLENGE#{sha256}" + bytes(32))
            impostor.recv_bytes()
            impostor.send_bytes(b"#WELCOME#")
            with contextlib.suppress(AuthenticationError, EOFError, OSError):
                answer_challenge(impostor, b"guess")

    with ThreadPoolExecutor(1) as pool:
        pool.submit(welcome)
        with pytest.raises(AuthenticationError, match="another token than that of 127"):
            dial_with(listener, "secret")


def test_stranger_who_says_nothing_is_cut_off(listener, accept_one) -> None:
    accepted = accept_one(seconds=0.1)
    with socket.create_connection(listener.getsockname()):
        assert isinstance(accepted.exception(5.0), (OSError, EOFError))


def test_address_that_others_reach_needs_a_token_and_a_taken_port_is_named(listener) -> None:
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0:0: other hosts reach it, so it needs a"):
        listen("0.0.0.0:0", "")
    listen("127.0.0.1:0", "").close()
    listen("localhost:0", "").close()
    with pytest.raises(ConfigError, match="already in use"):
        listen(address(listener), "secret")


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:port", "host:70000"])
def test_bad_addresses_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected host:port"):
        channels.split_address(text)


def test_addresses_of_both_families() -> None:
    assert channels.split_address("[::1]:80") == ("::1", 80)
    assert channels.join_address("::1", 80) == "[::1]:80"
    assert channels.join_address(*channels.split_address("a.example:80")) == "a.example:80"
