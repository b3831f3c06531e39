import pytest

from jaxserve import ports
from jaxserve.errors import ConfigError
from jaxserve.fleet.follower import Relay
from jaxserve.link.session.listener import listen
from tests.jaxserve.fleet.ends import identity


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> int:
    """A port that was free a moment ago; it and the next are the range."""
    monkeypatch.setattr(ports, "_range", ports._range)
    first = ports.free_port()
    ports.use(f"{first}-{first + 1}")
    return first


def test_what_names_no_port_listens_in_the_range(first: int) -> None:
    relay = Relay(identity(1), "a secret of this test")
    taken = [relay.listen("127.0.0.1")]
    with listen("127.0.0.1:0", "") as pages:
        taken.append(pages.getsockname()[1])
        assert sorted(taken) == [first, first + 1]
        with pytest.raises(ConfigError, match=rf"no port of cluster.ports {first}-\d+ is free on"):
            listen("127.0.0.1:0", "")
    relay.close()


def test_a_range_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.ports 9200-9100: expected FIRST-LAST"):
        ports.use("9200-9100")


def test_loopback() -> None:
    hosts = ["127.0.0.1", "127.3.2.1", "::1", "[::1]", "localhost", "10.0.0.1", "0.0.0.0", "node1"]
    assert [host for host in hosts if ports.is_loopback(host)] == hosts[:5]
