"""Links to shards, each a process, one of which is lost or late."""

import signal
from unittest.mock import Mock

import numpy as np
import pytest

from jaxserve.fleet.shard_links import ShardClients, links
from jaxserve.link.remote.client import LinkCounters
from tests.jaxserve.link.remote import test_client, toy_server
from tests.jaxserve.link.remote.test_client import KIND, LANES, client, on_mesh, values
from tests.jaxserve.waiting import until

toys, pytestmark = test_client.toys, pytest.mark.multihost


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_shard_that_is_lost_or_late_costs_the_others_nothing(toys, number):
    """Answers of the others have arrived when it is back, and none is asked for again."""
    with toys.servers({}, {}) as [shard, other], client(shard) as late, client(other) as kept:
        both = ShardClients([late, kept])
        shard.end(number) if number == signal.SIGKILL else shard.send_signal(number)
        for lane in range(LANES):
            both.send(lane, KIND, lane, toy_server.ROWS, on_mesh(values(lane)))
        until(lambda: all(one.whole for one in kept._unanswered.values()))
        shard.start() if number == signal.SIGKILL else shard.send_signal(signal.SIGCONT)
        for lane in range(LANES):
            for answer in both.receive(lane):
                np.testing.assert_array_equal(answer, 2 * values(lane) + lane)
        assert kept.counters == LinkCounters(messages=LANES)
        assert both.counters.messages == 2 * LANES
        assert late.counters.failures == (number == signal.SIGKILL)


def test_each_link_has_its_shard_s_workers_and_names_the_shard():
    role = Mock(_replace=lambda instance: instance)
    role.deployment.ffn, role.deployment.link.addresses = Mock(instances=2, processes=0), [*"abcd"]
    made = [(one.own, one.wanted) for one in links(role, lambda _, own: Mock(own=own)).clients]
    assert made == [([*own], f"ffn worker of shard {at}") for at, own in enumerate(("ac", "bd"))]
