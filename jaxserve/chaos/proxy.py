"""TCP proxy that fails on purpose. A storm puts one in front of every worker of a deployment.

Used by `storm.py`; knows nothing of the bytes that it carries.
"""

import contextlib
import random
import select
import socket
import threading
import time
from typing import Literal

from jaxserve.link.session.channel import split_address

READ_BYTES = 1 << 16
LOOK_SECONDS = 0.02
DIAL_SECONDS = 5.0

Disturbance = Literal["", "cut", "stall", "delay", "truncate", "corrupt", "omit"]


class Proxy:
    """Listens at one address and connects every client to another one.

    `disturb` changes its behaviour, for open connections and for new ones:

    cut: resets every connection. stall: carries nothing and closes nothing. delay: delivers every
    byte `size` seconds later. truncate: carries half of the next bytes of each connection and
    closes it, as if the sender had died in the middle of a frame. corrupt: changes one bit in the
    share `size` of all portions of up to 64 KiB. omit: leaves out one byte of them instead.

    Args:
      listens: host:port.
      target: host:port.
    """

    def __init__(self, listens: str, target: str):
        self._target = split_address(target)
        self._mode: Disturbance = ""
        self._size = 0.0
        self._closing = False
        self._random = random.Random(listens)
        self._listener = socket.create_server(split_address(listens))
        self._listener.settimeout(0.5)
        threading.Thread(target=self._accept, name=f"proxy {listens}", daemon=True).start()

    def disturb(self, mode: Disturbance, size: float = 0.0) -> None:
        """Changes the behaviour from now on; "" restores it."""
        self._size, self._mode = size, mode

    def close(self) -> None:
        """Closes all connections and stops listening."""
        self._closing = True
        self._mode = "cut"
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing:
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:  # closed, or no descriptor is left
                time.sleep(LOOK_SECONDS)
                continue
            try:
                threading.Thread(target=self._carry, args=(client,), daemon=True).start()
            except RuntimeError:  # no thread is left
                _reset(client)

    def _carry(self, client: socket.socket) -> None:
        """Carries one connection, both ways, in one thread."""
        with contextlib.ExitStack() as stack:
            stack.callback(_reset, client)
            if self._mode == "cut":
                return
            try:
                server = socket.create_connection(self._target, DIAL_SECONDS)
            except OSError:
                return
            stack.callback(_reset, server)
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                end.settimeout(DIAL_SECONDS)
            with contextlib.suppress(OSError):
                self._copy({client: server, server: client})

    def _copy(self, ways: dict[socket.socket, socket.socket]) -> None:
        late: list[tuple[float, socket.socket, bytes]] = []
        while self._mode != "cut":
            if self._mode == "stall":
                time.sleep(LOOK_SECONDS)
                continue
            wait = min(LOOK_SECONDS, max(0.0, late[0][0] - time.monotonic())) if late else None
            ready, _, _ = select.select([*ways], [], [], LOOK_SECONDS if wait is None else wait)
            for source in ready:
                data = source.recv(READ_BYTES)
                if not data:
                    for _, end, rest in late:
                        end.sendall(rest)
                    return
                if self._mode == "truncate":
                    ways[source].sendall(data[: len(data) // 2])
                    return
                if self._mode in ("corrupt", "omit") and self._random.random() < self._size:
                    data = self._changed(data)
                if self._mode == "delay" or late:
                    late.append((time.monotonic() + self._size, ways[source], data))
                else:
                    ways[source].sendall(data)
            while late and (late[0][0] <= time.monotonic() or self._mode != "delay"):
                _, end, data = late.pop(0)
                end.sendall(data)

    def _changed(self, data: bytes) -> bytes:
        """Returns the data with one bit changed, or without one byte."""
        changed, at = bytearray(data), self._random.randrange(len(data))
        if self._mode == "omit":
            del changed[at]
        else:
            changed[at] ^= 1 << self._random.randrange(8)
        return bytes(changed)


def _reset(end: socket.socket) -> None:
    """Closes at once; the other end gets an error, not an end of file."""
    with contextlib.suppress(OSError):
        linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    end.close()
