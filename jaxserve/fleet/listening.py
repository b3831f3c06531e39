"""Sockets on which a process listens for the control plane and the broadcast.

Called by `leader.py`, `follower.py` and `broadcast.py`.
"""

import socket

from jaxserve.fleet.addresses import is_ip, is_loopback
from jaxserve.ports import listening


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
