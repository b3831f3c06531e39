import socket
from collections.abc import Iterator

import jax
import pytest

from jaxserve import ports
from jaxserve.errors import ConfigError
from jaxserve.fleet.broadcast import Broadcaster
from jaxserve.link.channel import listen
from jaxserve.link.transfers import Transfers

TOKEN = "a secret of this test"


@pytest.fixture
def two() -> Iterator[set[int]]:
    """Two ports that were free a moment ago are the range."""
    for _ in range(100):
        first = ports.free_port()
        try:
            socket.create_server(("127.0.0.1", first + 1)).close()
        except OSError:
            continue
        ports.use(f"{first}-{first + 1}")
        yield {first, first + 1}
        break
    ports.use("")


def test_what_names_no_port_listens_in_the_range(two: set[int]) -> None:
    broadcaster = Broadcaster(TOKEN)
    taken = {broadcaster.listen("127.0.0.1")}
    with listen("127.0.0.1:0", TOKEN) as pages:
        taken.add(pages.getsockname()[1])
        assert taken == two
        with pytest.raises(ConfigError, match=r"no port of cluster.ports \d+-\d+ is free on"):
            listen("127.0.0.1:0", TOKEN)
    broadcaster.close()


def test_transfers_of_arrays_are_in_the_range(two: set[int]) -> None:
    transfers = Transfers(jax.devices()[0], "127.0.0.1")
    assert int(transfers.address.rpartition(":")[2]) in two


def test_a_range_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.ports 9200-9100: expected FIRST-LAST"):
        ports.use("9200-9100")
