"""Faults of a proxy in the bytes between two ends."""

import contextlib
import socket
import threading
import time

import pytest

from jaxserve.chaos.proxy import Proxy
from jaxserve.ports import free_port

SECONDS = 20.0


@pytest.fixture
def ends():
    """The proxy, and the two ends of a connection through it."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        server.settimeout(SECONDS)
        address = f"127.0.0.1:{free_port()}"
        proxy = Proxy(address, f"127.0.0.1:{server.getsockname()[1]}")
        stack.callback(proxy.close)
        host, port = address.split(":")
        client = stack.enter_context(socket.create_connection((host, int(port)), SECONDS))
        client.sendall(b"hello")
        there, _ = server.accept()
        stack.enter_context(there)
        there.settimeout(SECONDS)
        assert there.recv(100) == b"hello"
        there.sendall(b"welcome")
        assert client.recv(100) == b"welcome"
        yield proxy, client, there


def test_a_cut_reaches_both_ends_and_then_it_connects_again(ends):
    proxy, client, there = ends
    address = client.getpeername()
    proxy.disturb("cut")
    for end in (client, there):
        with pytest.raises(ConnectionResetError):
            end.recv(100)
    proxy.disturb("")
    with socket.create_connection(address, SECONDS) as again:
        again.sendall(b"hello")
        again.settimeout(0.2)
        with pytest.raises(TimeoutError):
            again.recv(100)  # it is there, and nobody answers


def test_what_was_stalled_comes_later(ends):
    proxy, client, there = ends
    proxy.disturb("stall")
    time.sleep(0.1)
    client.sendall(b"late")
    there.settimeout(0.2)
    with pytest.raises(TimeoutError):
        there.recv(100)
    proxy.disturb("")
    there.settimeout(SECONDS)
    assert there.recv(100) == b"late"


def test_delayed_bytes_keep_their_order(ends):
    proxy, client, there = ends
    proxy.disturb("delay", 0.1)
    begin = time.monotonic()
    threading.Timer(0.05, proxy.disturb, args=("delay", 0.01)).start()
    for word in (b"one ", b"two ", b"three"):
        client.sendall(word)
        time.sleep(0.04)
    found = b""
    while len(found) < 13:
        found += there.recv(100)
    assert found == b"one two three"
    assert time.monotonic() - begin >= 0.1


def test_half_of_a_frame_and_the_end(ends):
    proxy, client, there = ends
    proxy.disturb("truncate")
    client.sendall(b"12345678")
    assert there.recv(100) == b"1234"
    with pytest.raises(ConnectionResetError):
        there.recv(100)


def test_a_bit_of_what_is_carried_is_another(ends):
    proxy, client, there = ends
    proxy.disturb("corrupt", 1.0)
    for sent in (b"12345678", b"x"):
        client.sendall(sent)
        pairs = zip(sent, there.recv(100), strict=True)
        assert sum((a ^ b).bit_count() for a, b in pairs) == 1
    proxy.disturb("")
    client.sendall(b"as it is")
    assert there.recv(100) == b"as it is"


def test_it_accepts_again_after_a_thread_that_could_not_be_started(ends, monkeypatch):
    proxy, client, _ = ends
    start, failed = threading.Thread.start, threading.Event()

    def fails_once(thread: threading.Thread) -> None:
        if not failed.is_set():
            failed.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fails_once)
    address = client.getpeername()
    # The proxy closes it; the reset may come before the connection is seen to be open.
    with contextlib.suppress(ConnectionResetError), socket.create_connection(address, SECONDS):
        assert failed.wait(SECONDS)
    accepting = [t for t in threading.enumerate() if t.name.startswith("proxy ")]
    with socket.create_connection(address, SECONDS) as again:
        again.settimeout(SECONDS)
        proxy.disturb("cut")
        with pytest.raises(ConnectionResetError):
            again.recv(100)
    assert all(thread.is_alive() for thread in accepting)
