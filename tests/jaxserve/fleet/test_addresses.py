from jaxserve.fleet import addresses


def test_loopback() -> None:
    hosts = ["127.0.0.1", "127.3.2.1", "::1", "[::1]", "localhost", "10.0.0.1", "0.0.0.0", "node1"]
    assert [host for host in hosts if addresses.is_loopback(host)] == hosts[:5]
