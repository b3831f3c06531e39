"""Where process 0 listens for the control plane, so that processes on other hosts reach it.

Called by `bootstrap.py`.
"""

import logging
import socket

from jaxserve.fleet.addresses import is_ip, is_loopback
from jaxserve.link.session.channel import split_address

logger = logging.getLogger(__name__)


def listening_address(address: str, flag: str) -> str:
    """Returns where to listen so that other hosts reach this one at `address` (`host:port`).

    Usually `address` itself. On the host that bears a name, the name may resolve to loopback alone
    (Debian writes 127.0.1.1 into /etc/hosts) or, in a container that has just started, to nothing
    yet. No other host could connect then, so all interfaces take its place.
    """
    host, port = split_address(address, flag)
    if is_loopback(host) or is_ip(host):
        return address
    try:
        resolved = [str(info[4][0]) for info in socket.getaddrinfo(host, port)]
    except OSError:
        resolved = []
    if any(not is_loopback(found) for found in resolved):
        return address
    reason = f"resolves to {', '.join(sorted(set(resolved)))}" if resolved else "does not resolve"
    logger.info("%s %s %s on this host: listening on all interfaces", flag, host, reason)
    return f"[::]:{port}"
