"""Tells whether an address of a host can be reached from others. Resolves no names.

Knows nothing of deployments or JAX.
"""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this host alone."""
    ip = _ip(host)
    return host == "localhost" if ip is None else ip.is_loopback


def is_ip(host: str) -> bool:
    """Whether a host is named by its address."""
    return _ip(host) is not None


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
