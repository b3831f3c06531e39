"""A listening socket with a thread that lets connections in, as the link's servers have one.

Used by `pull_server.py` and `pages_server.py`, which say what becomes of a connection.
"""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable

from jaxserve.link.channel import TICK_SECONDS, join_address, listen

logger = logging.getLogger(__name__)


class Listener:
    """Accepts connections until it is closed.

    Args:
      name: of the server, for logs.
      address: to listen on; port 0 takes a free one.
      token: the secret of the deployment.
      admit: takes an accepted socket; must not wait.
      count: how many connections there are.
      most: connections, strangers in the middle of a handshake included; further ones are closed.
    """

    def __init__(
        self,
        name: str,
        address: str,
        token: str,
        admit: Callable[[socket.socket], None],
        count: Callable[[], int],
        most: int,
    ):
        self._name, self._address, self._token = name, address, token
        self._admit, self._count, self._most = admit, count, most
        self._socket: socket.socket | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._accept, name=f"{name} server", daemon=True)

    def start(self) -> str:
        """Begins to accept and returns the address.

        Raises:
          ConfigError: the address cannot be listened on, or needs a token.
        """
        self._socket = listen(self._address, self._token)
        self._thread.start()
        return join_address(*self._socket.getsockname()[:2])

    def close(self, seconds: float) -> None:
        """Accepts no more; once is enough, before `start` is fine."""
        self._closing = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._thread.join(seconds)
            self._socket.close()

    def _accept(self) -> None:
        assert self._socket is not None
        while not self._closing:
            try:
                sock, address = self._socket.accept()
            except OSError as error:
                if not self._closing:
                    logger.warning("%s: a connection could not be accepted: %s", self._name, error)
                    threading.Event().wait(TICK_SECONDS)
                continue
            if self._count() < self._most:
                self._admit(sock)
            else:
                logger.warning(
                    "%s: %s turned away: %d connections", self._name, address, self._most
                )
                sock.close()
