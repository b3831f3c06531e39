"""Tries whether an address can be reached, so that start-up names the one that cannot.

Called by `follower.py` and `bootstrap.py`.
"""

import socket
import time

from jaxserve.link.session.channel import split_address

_CONNECT_SECONDS = 3.0
_PAUSE_SECONDS = 0.1


def unreachable(address: str, seconds: float = 0.0) -> str:
    """Returns why no connection to `host:port` succeeds, empty if one does.

    Args:
      seconds: Time in which it tries again; 0: it tries once.
    """
    host, port = split_address(address)
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
        except OSError as error:
            if time.monotonic() >= deadline:
                return f"{error}"
            time.sleep(_PAUSE_SECONDS)
        else:
            return ""
