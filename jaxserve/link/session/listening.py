"""Listening sockets of links between workers."""

import ipaddress
import socket

from jaxserve.errors import ConfigError
from jaxserve.link.session.channel import is_path, split_address
from jaxserve.ports import listening


def listen(address: str, token: str) -> socket.socket:
    """A listening socket at host:port, of which port 0 takes a free one, or at a path.

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
