"""Links to shards, each a process, one of which is lost or late."""

import signal

import numpy as np
import pytest

from jaxserve.fleet.shard_links import ShardClients
from jaxserve.link.remote.client import LinkCounters
from jaxserve.link.remote.hedging import HedgedClient
from jaxserve.link.remote.peer import PeerState
from tests.jaxserve.link.remote import test_client, toy_server
from tests.jaxserve.link.remote.test_client import KIND, LANES, client, on_mesh, rounds, values
from tests.jaxserve.waiting import until

toys, pytestmark = test_client.toys, pytest.mark.multihost


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_shard_that_is_lost_or_late_costs_the_others_nothing(toys, number):
    """Answers of the others have arrived when it is back, and none is asked for again."""
    with toys.servers({}, {}) as [shard, other], client(shard) as late, client(other) as kept:
        links = ShardClients([late, kept])
        shard.end(number) if number == signal.SIGKILL else shard.send_signal(number)
        for lane in range(LANES):
            links.send(lane, KIND, lane, toy_server.ROWS, on_mesh(values(lane)))
        until(lambda: all(one.whole for one in kept._unanswered.values()))
        shard.start() if number == signal.SIGKILL else shard.send_signal(signal.SIGCONT)
        for lane in range(LANES):
            for answer in links.receive(lane):
                np.testing.assert_array_equal(answer, 2 * values(lane) + lane)
        assert kept.counters == LinkCounters(messages=LANES)
        assert links.counters.messages == 2 * LANES
        assert late.counters.failures == (number == signal.SIGKILL)


def test_the_standby_of_a_late_shard_is_asked(toys, monkeypatch):
    """Before the shard is suspected, and without giving it up."""
    monkeypatch.setattr("jaxserve.link.remote.client.MessageClient", HedgedClient)
    with toys.servers({}, {}) as started, client(*started) as link:
        until(lambda: all(peer.state is PeerState.UP for peer in link.peers))
        rounds(link, 0, 20)
        late = next(one for one in started if one.address == toy_server.in_use(link))
        late.send_signal(signal.SIGSTOP)
        rounds(link, 100, 2)
        assert toy_server.in_use(link) != late.address
        late.send_signal(signal.SIGCONT)
        rounds(link, 200, 20)
        assert link.counters.failures == 0 < link.counters.resends
