"""Sockets to listen on, bound before anything is served.

Called by the HTTP server and `face_processes.py`; knows no protocol.
"""

import contextlib
import os
import socket
import stat

from jaxserve.errors import ConfigError


def bind(host: str, port: int, key: str, *, reuse_port: bool = False) -> socket.socket:
    """A bound TCP socket that does not listen yet.

    Args:
      host: an address or name of this machine.
      port: 0 picks a free one.
      key: configuration key that sets the port, for errors.
      reuse_port: whether sockets of other processes may be bound to the same port; the kernel
        spreads connections over those that listen.

    Raises:
      ConfigError: the address is in use or not this machine's.
    """
    made: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if reuse_port:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(address)
        return made
    except OSError as error:
        if made is not None:
            made.close()
        raise ConfigError(
            f"{key}: cannot listen on {host}:{port} ({error.strerror or error})"
        ) from None


def reserve(host: str, port: int, key: str) -> socket.socket:
    """A bound socket that keeps a port for processes that will share it; it never listens.

    Raises:
      ConfigError: the port is in use, be it by a server that shares it.
    """
    with bind(host, port, key) as alone:
        found = alone.getsockname()[1]
    return bind(host, found, key, reuse_port=True)


SOCKET_MODE = 0o660
"""Mode of a Unix socket's file: for user and group of the process."""


def bind_unix(path: str, key: str) -> socket.socket:
    """A bound Unix socket that does not listen yet. Replaces a stale socket without a listener.

    Args:
      path: path of its file; the caller removes it after closing the socket (`remove_unix`).
      key: configuration key that sets the path, for errors.

    Raises:
      ConfigError: another process listens there, or no socket can be made there.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if stat.S_ISSOCK(os.stat(path).st_mode) and _abandoned(path):
            os.unlink(path)
    except OSError:  # bind says what is wrong
        pass
    try:
        made.bind(path)
        os.chmod(path, SOCKET_MODE)
        return made
    except OSError as error:
        made.close()
        raise ConfigError(f"{key}: cannot listen on {path} ({error.strerror or error})") from None


def remove_unix(path: str) -> None:
    """Removes the file of a Unix socket; does nothing if it does not exist."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def _abandoned(path: str) -> bool:
    """Whether no process listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        try:
            caller.connect(path)
        except ConnectionRefusedError:
            return True
    return False
