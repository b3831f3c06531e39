"""Where a process listens for those that it hands plans on to.

Called by `follower.py` and `broadcast.py`.
"""

import socket

from jaxserve.fleet.addresses import is_ip, is_loopback
from jaxserve.ports import listening


def everywhere(towards: str) -> str:
    """Returns the host to listen on for all that reach that host: loopback alone, or all."""
    return "127.0.0.1" if is_loopback(towards) else "[::]"


def listening_socket(host: str) -> socket.socket:
    """Returns a socket that listens on a free port of an address of this host.

    `[::]` stands for all addresses, and so does a name, which may have several.
    """
    bare, dual = host.strip("[]"), socket.has_dualstack_ipv6()
    if not is_ip(host) and not is_loopback(host):
        bare = "::"
    if bare == "::" and not dual:
        bare = "0.0.0.0"
    family = socket.getaddrinfo(bare, 0, type=socket.SOCK_STREAM)[0][0]
    every = dual and bare == "::"
    return listening(bare, 0, family=family, backlog=128, dualstack_ipv6=every)
