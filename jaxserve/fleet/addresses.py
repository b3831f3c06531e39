"""Addresses of hosts: what others can reach, and where to listen so that they do.

Called by `arguments.py`, `bootstrap.py`, `devices.py` and the bench. Knows nothing of deployments
or JAX.
"""

import ipaddress
import logging
import socket

from jaxserve.errors import ConfigError

logger = logging.getLogger(__name__)

_ELSEWHERE = "192.0.2.1"
"""An address that belongs to nobody (RFC 5737): the default route leads to it."""


def split_address(address: str, flag: str) -> tuple[str, int]:
    """Host and port of `host:port`.

    Raises:
      ConfigError: it is something else; names the flag it came from.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{flag} {address!r}: expected host:port")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this host alone. Resolves no names."""
    ip = _ip(host)
    return host == "localhost" if ip is None else ip.is_loopback


def listening_address(address: str, flag: str) -> str:
    """Where to listen so that other hosts reach this one at `address` (`host:port`).

    Usually `address` itself. On the host that bears a name, the name may resolve to loopback alone
    (Debian writes 127.0.1.1 into /etc/hosts) or, in a container that has just started, to nothing
    yet; nobody else could connect then, so all interfaces take its place.
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


def local_address(host: str, port: int, flag: str) -> str:
    """This host's own address on the network that leads to `host`; sends nothing.

    Raises:
      ConfigError: `host` does not resolve, or to loopback although other hosts are to use it, and
        this host has no other address.
    """
    if is_loopback(host):
        return "127.0.0.1" if host == "localhost" else host
    try:
        address = _address_towards(host, port)
        if is_loopback(address):  # this host's own name
            address = _address_towards(_ELSEWHERE, port)
    except OSError as error:
        raise ConfigError(
            f"{flag} {host}: this host has no address on a network that leads there ({error}); "
            "give the IP address of process 0 instead"
        ) from None
    return f"[{address}]" if ":" in address else address


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host.strip("[]"), 0))
        return int(probe.getsockname()[1])


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
