import socket

import pytest

from jaxserve.errors import ConfigError
from jaxserve.fleet import addresses


def test_loopback() -> None:
    hosts = ["127.0.0.1", "127.3.2.1", "::1", "[::1]", "localhost", "10.0.0.1", "0.0.0.0", "node1"]
    assert [host for host in hosts if addresses.is_loopback(host)] == hosts[:5]


def resolving(monkeypatch: pytest.MonkeyPatch, **hosts: str) -> None:
    """Names resolve to these addresses; all others do not."""

    def getaddrinfo(host: str, port: int, **options: object) -> list[tuple[object, ...]]:
        found = hosts.get(host, host)
        if not found or found[0].isalpha():
            raise socket.gaierror(f"no such name: {host}")
        return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", (found, port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_own_address_is_not_the_loopback_of_the_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch, debian="127.0.1.1")
    towards = {"127.0.1.1": "127.0.0.1", addresses._ELSEWHERE: "10.0.0.9"}
    monkeypatch.setattr(
        addresses,
        "_address_towards",
        lambda host, port: towards[{"debian": "127.0.1.1"}.get(host, host)],
    )
    assert addresses.local_address("debian", 7, "--coordinator") == "10.0.0.9"
    assert addresses.local_address("localhost", 7, "--coordinator") == "127.0.0.1"


def test_a_name_that_leads_nowhere_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch)
    with pytest.raises(ConfigError, match="--coordinator nowhere: this host has no address"):
        addresses.local_address("nowhere", 7, "--coordinator")
