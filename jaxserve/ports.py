"""Ports that this process takes where no address names one, and what an address says of its host.

`serve` calls `use` with `cluster.ports` before anything listens. Called by every module that
listens on a port of its own choice: the broadcast tree, hand-offs of pages. Resolves no names.
"""

import contextlib
import ipaddress
import random
import socket
from typing import Any

from jaxserve.errors import ConfigError

_range = range(0)
_OURS = range(10_000, 30_000)
"""Where free ports are looked for without a range. Linux gives those from 32768 to any connection,
so that one which is free may be taken before its process listens; Kubernetes' begin at 30000."""


def use(ports: str) -> None:
    """Sets the range, as `FIRST-LAST`; empty: the system chooses ports.

    Raises:
      ConfigError: The range is empty, or not one of ports.
    """
    global _range
    _range = range(0)
    if ports:
        first, last = map(int, ports.split("-"))
        if not first <= last < 65536:
            raise ConfigError(f"cluster.ports {ports}: expected FIRST-LAST, at most 65535")
        _range = range(first, last + 1)


def listening(host: str, port: int, among: range | None = None, **options: Any) -> socket.socket:
    """Returns a listening socket, as `socket.create_server` does; port 0 takes a free one.

    Processes of one host share the range, so they try its ports in a random order.

    Args:
      among: range of ports; None: as `use` has set it.

    Raises:
      OSError: the address cannot be listened on, or no port of the range is free.
    """
    if port or not (among := among or _range):
        return socket.create_server((host, port), **options)
    for each in random.sample(among, len(among)):
        with contextlib.suppress(OSError):  # it is taken
            return socket.create_server((host, each), **options)
    raise OSError(f"no port of cluster.ports {among[0]}-{among[-1]} is free on {host}")


def free_port(host: str = "127.0.0.1") -> int:
    """Returns a port that is free now."""
    return free_ports(1, host)[0]


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Returns different ports that are free now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as stack:
        probes = (
            stack.enter_context(listening(host.strip("[]"), 0, _range or _OURS, family=family))
            for _ in range(count)
        )
        return [probe.getsockname()[1] for probe in probes]


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
