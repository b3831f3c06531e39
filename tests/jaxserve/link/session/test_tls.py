"""Channels in mutual TLS over real sockets; `golden/tls` has certificates of two authorities."""

import contextlib
import os
import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jaxserve.errors import ConfigError
from jaxserve.link.session import tls
from jaxserve.link.session.channel import Channel, accept, dial, join_address
from tests import golden

OWN, OTHER = (str(golden.FOLDER / "tls" / name) for name in ("own", "other"))


@pytest.fixture(autouse=True)
def in_clear_afterwards() -> Iterator[None]:
    yield
    tls.use("")


def use(accepting: str, dialling: str) -> None:
    """Gives the two ends different folders; empty: no TLS there."""
    found = {}
    for accepted, folder in {True: accepting, False: dialling}.items():
        tls.use(folder)
        found |= {end: one for end, one in tls._ends.items() if end == accepted}
    tls.use("")
    tls._ends.update(found)


@contextlib.contextmanager
def relay(target: socket.socket, seen: bytearray) -> Iterator[socket.socket]:
    """A listening socket whose connection goes on to the target; keeps what goes through."""

    def carry(source: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                seen.extend(data)
                to.sendall(data)
            to.shutdown(socket.SHUT_WR)

    def connect() -> None:
        near, far = listening.accept()[0], socket.create_connection(target.getsockname())
        with near, far, ThreadPoolExecutor(1) as pool:
            pool.submit(carry, far, near)
            carry(near, far)

    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:
        pool.submit(connect)
        yield listening


def connected(listening: socket.socket, through: socket.socket) -> tuple[Channel, Channel]:
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(lambda: accept(listening.accept()[0], "a secret", 5))
        client = dial(join_address(*through.getsockname()), "a secret", 5)
        return client, accepted.result()


@pytest.mark.parametrize("folder", [OWN, ""])
def test_nothing_is_readable_on_the_way(folder: str) -> None:
    """Large parts go both ways at once; without TLS the same bytes are found."""
    tls.use(folder)
    part, seen = memoryview(os.urandom(4 << 20)), bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listening, relay(listening, seen) as through:
        ends = connected(listening, through)
        with ThreadPoolExecutor(2) as pool:
            for end in ends:
                pool.submit(end.send, b"a frame", [part])
            for end in ends:
                received = memoryview(bytearray(len(part)))
                assert end.receive() == b"a frame"
                end.receive_into(received, 30)
                assert received == part
        assert ends[0].peer.startswith("127.0.0.1:")
        ends[0].close()
        with pytest.raises((EOFError, OSError)):
            ends[1].receive()
        ends[1].close()
    for plain in (b"a frame", part[: 1 << 10]):
        assert (bytes(plain) in seen) is not bool(folder)


@pytest.mark.parametrize("ends", [(OWN, OTHER), (OTHER, OWN), ("", OWN), (OWN, "")])
def test_others_are_turned_away(ends: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "HANDSHAKE_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:
        listening.settimeout(5)
        use(*ends)
        accepted = pool.submit(lambda: accept(listening.accept()[0], "a secret", 2))
        said = (
            r"no TLS 1\.3 with a certificate that cluster\.tls accepts"
            if ends == ("", OWN)
            else None
        )
        with pytest.raises((EOFError, OSError), match=said):
            dial(join_address(*listening.getsockname()), "a secret", 2).receive()
        with pytest.raises((EOFError, OSError)):
            accepted.result()


def test_renewed_certificates_are_read_without_a_restart(tmp_path: Path, caplog) -> None:
    """Both ends change their authority between two connections; broken files change nothing."""
    folder = shutil.copytree(OWN, tmp_path / "tls")
    tls.use(str(folder))

    def connect() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            for end in connected(listening, listening):
                end.close()

    for name in ("tls.key", "tls.crt", "ca.crt"):
        connect()
        assert caplog.messages == []
        (folder / name).write_text("half a file")
        connect()
        assert {record.levelname for record in caplog.records} == {"ERROR"}
        assert f"cluster.tls {folder}: {name}: " in caplog.text
        caplog.clear()
        shutil.copytree(OTHER, folder, dirs_exist_ok=True)
    connect()
    assert caplog.messages == []
    use(str(folder), OTHER)
    connect()


@pytest.mark.parametrize("name", ["ca.crt", "tls.crt", "tls.key"])
def test_a_folder_without_certificates_is_refused(name: str, tmp_path: Path) -> None:
    folder = shutil.copytree(OWN, tmp_path / "tls")
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=rf"cluster\.tls .*tls: {name}: .*No such file"):
        tls.use(str(folder))
