"""A listening socket whose connections are authenticated and served, each on a thread of its own.

Used by the servers of links, a worker's port for routers and broadcasts. They say what becomes of a
connection; this module keeps them reachable: strangers cannot fill the server up, and no error of
one connection ends the thread that accepts.
"""

import contextlib
import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Callable

from jaxserve.errors import ConfigError
from jaxserve.link.session.channel import (
    MAX_FRAME_BYTES,
    AuthenticationError,
    Channel,
    accept,
    closed_on_error,
    is_path,
    join_address,
    split_address,
)
from jaxserve.ports import listening

MOST_HANDSHAKES = 64
"""Connections that have not proved yet that they know the token. A further one ends the oldest: a
peer answers within milliseconds, strangers that send nothing stay."""
RETRY_SECONDS = 1.0
"""Pause after a connection could not be accepted."""

logger = logging.getLogger(__name__)


class Listener:
    """Accepts connections until it is closed.

    Args:
      name: of the server, for logs.
      token: the secret of the deployment.
      serve: takes an authenticated channel on a thread of its own, and closes it.
      most: authenticated connections at a time; further ones are closed.
      seconds: deadline of the handshake.
      frame_bytes: cap of a received frame.
    """

    def __init__(
        self,
        name: str,
        token: str,
        serve: Callable[[Channel], None],
        *,
        most: int,
        seconds: float,
        frame_bytes: int = MAX_FRAME_BYTES,
    ):
        self._name, self._token, self._serve = name, token, serve
        self._most, self._seconds, self._frame_bytes = most, seconds, frame_bytes
        self._socket: socket.socket | None = None
        self._closing = False
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, socket.socket] = {}  # the oldest first
        self._threads: dict[threading.Thread, Channel] = {}  # of authenticated connections
        self._thread = threading.Thread(target=self._accept, name=f"{name} server", daemon=True)

    def start(self, listening: socket.socket) -> str:
        """Begins to accept and returns the address."""
        self._socket = listening
        self._thread.start()
        return address_of(listening)

    def close(self, seconds: float) -> None:
        """Ends all connections and waits for threads. Idempotent, allowed before `start`."""
        self._closing = True
        deadline = time.monotonic() + seconds
        if self._socket is not None:
            shut(self._socket)
            self._thread.join(seconds)
            self._socket.close()
        with self._lock:
            served = list(self._threads.items())
            for stranger in self._strangers:
                shut(stranger)
        for _, channel in served:
            channel.shutdown()
        for thread, _ in served:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _accept(self) -> None:
        assert self._socket is not None
        while not self._closing:
            try:
                sock, _ = self._socket.accept()
                with closed_on_error(sock):
                    threading.Thread(target=self._live, args=(sock,), daemon=True).start()
            except (OSError, RuntimeError) as error:  # no descriptor or no thread is left
                if not self._closing:
                    logger.warning("%s: connections cannot be accepted: %s", self._name, error)
                    time.sleep(RETRY_SECONDS)

    def _live(self, sock: socket.socket) -> None:
        """From the accepted socket to the connection's end."""
        with self._lock:
            self._strangers[sock] = sock
            if len(self._strangers) > MOST_HANDSHAKES:
                shut(self._strangers.pop(next(iter(self._strangers))))  # each one once
        try:
            channel = accept(sock, self._token, self._seconds, self._frame_bytes)
        except (AuthenticationError, OSError, EOFError, RuntimeError) as error:
            why = f"{error}" or "it closed the connection"
            logger.warning("%s: a connection was turned away: %s", self._name, why)
            return
        finally:
            with self._lock:
                self._strangers.pop(sock, None)
        thread = threading.current_thread()
        with self._lock:
            if len(self._threads) < self._most and not self._closing:
                self._threads[thread] = channel
        if thread not in self._threads:
            logger.warning("%s: %s is one more than %d", self._name, channel.peer, self._most)
            channel.close()
            return
        try:
            self._serve(channel)
        except Exception:
            logger.exception("%s: the connection of %s", self._name, channel.peer)
        finally:
            self._threads.pop(thread, None)


def listen(address: str, token: str) -> socket.socket:
    """Returns a listening socket at host:port, where port 0 takes a free one, or at a path.

    Raises:
      ConfigError: the address is neither, cannot be listened on, or is reachable from other hosts
        while there is no token.
    """
    host, port = ("", 0) if is_path(address) else split_address(address)
    try:
        if not host:
            return socket.create_server(address, family=socket.AF_UNIX, backlog=64)
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        if not token and not all(ipaddress.ip_address(a[4][0]).is_loopback for a in found):
            raise ConfigError(
                f"link address {address}: other hosts reach it, so it needs a token (one secret, "
                "the same for every worker)"
            )
        return listening(host, port, family=found[0][0], backlog=64)
    except OSError as error:
        raise ConfigError(f"link address {address}: {error}") from error


def shut(sock: socket.socket) -> None:
    """Wakes the thread that accepts or reads."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def address_of(sock: socket.socket) -> str:
    """Returns the address at which a socket listens, for `dial`."""
    name = sock.getsockname()
    return name if isinstance(name, str) else join_address(*name[:2])
