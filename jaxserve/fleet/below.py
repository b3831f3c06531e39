"""The processes that get plans from this one: where it listens for them, and their sessions.

The engine's thread sends a boundary to every process directly below with one system call each, and
waits for none (`Channel.post`). Used by the leader (`leader.py`) and by followers that hand its
messages on (`follower.py`).
"""

import contextlib
import socket

import msgspec

from jaxserve.fleet import control
from jaxserve.link.session.messages import encode
from jaxserve.link.session.served import ServedSession
from jaxserve.ports import is_ip, is_loopback, listening

HELLO_SECONDS = 10.0
"""Seconds within which a follower proves its token and registers."""


class Below(ServedSession):
    """A process directly below this one."""

    greeting = control.Register

    def send(self, message: msgspec.Struct) -> None:
        """See `Session`; never waits for the peer."""
        self.post(encode(message))

    def post(self, body: bytes) -> None:
        """Sends an encoded message, behind all earlier ones."""
        with contextlib.suppress(OSError):  # the thread that reads says why
            self._channel.post(body)


def everywhere(towards: str) -> str:
    """Returns the host to listen on for all that reach that host: loopback alone, or all."""
    return "127.0.0.1" if is_loopback(towards) else "[::]"


def listening_socket(host: str, port: int = 0) -> socket.socket:
    """Returns a socket that listens on a port of an address of this host; port 0 takes a free one.

    `[::]` stands for all addresses. So does a name: it may have several, or resolve to loopback
    alone on its own host (Debian writes 127.0.1.1 into /etc/hosts).

    Raises:
      OSError: the port is taken, or the address is none of this host's.
    """
    bare, dual = host.strip("[]"), socket.has_dualstack_ipv6()
    if not is_ip(host) and not is_loopback(host):
        bare = "::"
    if bare == "::" and not dual:
        bare = "0.0.0.0"
    family = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM)[0][0]
    every = dual and bare == "::"
    return listening(bare, port, family=family, backlog=128, dualstack_ipv6=every)
