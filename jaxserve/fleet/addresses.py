"""Addresses of hosts: what others can reach, and where to listen so that they do.

Called by `arguments.py`, `bootstrap.py`, `devices.py` and the bench. Knows nothing of deployments
or JAX.
"""

import ipaddress
import socket

from jaxserve.errors import ConfigError

_ELSEWHERE = "192.0.2.1"
"""An address that belongs to nobody (RFC 5737): the default route leads to it."""


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this host alone. Resolves no names."""
    ip = _ip(host)
    return host == "localhost" if ip is None else ip.is_loopback


def local_address(host: str, port: int, flag: str) -> str:
    """This host's own address on the network that leads to `host`, an IPv6 one in brackets; sends
    nothing.

    Raises:
      ConfigError: `host` does not resolve, or to loopback although other hosts are to use it, and
        this host has no other address.
    """
    try:
        address = "127.0.0.1" if host == "localhost" else _address_towards(host, port)
        if is_loopback(address) and not is_loopback(host):  # this host's own name
            address = _address_towards(_ELSEWHERE, port)
    except OSError as error:
        raise ConfigError(
            f"{flag} {host}: this host has no address on a network that leads there ({error}); "
            "give the IP address of process 0 instead"
        ) from None
    return f"[{address}]" if ":" in address else address


def _address_towards(host: str, port: int) -> str:
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def is_ip(host: str) -> bool:
    """Whether a host is named by its address."""
    return _ip(host) is not None


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
