"""Receives the word of child processes that they are ready; `supervisor.py` acts on it."""

import contextlib
import secrets
import socket
import struct
import sys
from collections.abc import Iterator

_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of a sender, which the system adds (unix(7))."""


class Readiness:
    """A socket to which processes report as to systemd (sd_notify(3)).

    Attributes:
      address: value of `NOTIFY_SOCKET` for the children: a name without a file (unix(7)), on Linux
        alone.
    """

    def __init__(self) -> None:
        self.address = f"@jaxserve-{secrets.token_hex(8)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        if sys.platform == "linux":  # elsewhere no process reports
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._socket.bind(f"\0{self.address[1:]}")

    def reports(self) -> Iterator[int]:
        """Yields the ids of processes that have become ready since the last call."""
        room = socket.CMSG_SPACE(_CREDENTIALS.size)
        with contextlib.suppress(BlockingIOError):  # nothing is left
            while True:
                message, ((*_, sender),), *_ = self._socket.recvmsg(64, room)
                if message == b"READY=1":
                    yield _CREDENTIALS.unpack(sender)[0]

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()
