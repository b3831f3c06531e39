"""Links to shards, each a process, one of which is lost or late."""

import signal
from unittest.mock import Mock

import numpy as np
import pytest

from jaxserve.fleet import shard_links
from jaxserve.fleet.shard_links import OwnRows, ShardClients, links
from jaxserve.link.dispatch.contract import Contract, experts_of
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


def test_a_shard_gets_the_rows_of_its_experts(monkeypatch):
    """Of 8 experts it has 2 to 5: five of eight rows need it. It gets one row at least."""
    shapes = {"groups": 1, "attention_devices": 1, "d_model": 6, "top_k": 2, "experts": 8}
    formats = {"dispatch": "int8", "combine": "float32"}
    contract = Contract(**shapes, **formats, layers=("dense", "moe"), instances=2)
    own, form = OwnRows(contract, range(2, 6)), shard_links.message_formats(contract)["moe"]
    ids = [[0, 1], [1, 2], [5, 6], [6, 7], [3, 4], [7, 0], [7, 5], [2, 3]]

    def packed(experts):
        rows = form.padding(len(experts))
        rows[:, form.experts_at : form.experts_at + 8] = np.array(experts, np.int32).view(np.uint8)
        return rows

    assert not own("moe", [packed(ids)])
    monkeypatch.setattr(shard_links, "LEAST_BYTES", 1)
    assert not own("dense", [packed(ids)])
    assert not own("moe", [packed(ids[6:])])  # both rows
    assert own("moe", [packed(ids)]) == [bytes([0b01101011])]
    assert own("moe", [packed([ids[0], ids[3], ids[5]])]) == [bytes([0b10000000])]
    assert [list(experts_of(7, 4, shard)) for shard in range(4)] == [[0], [1, 2], [3, 4], [5, 6]]


@pytest.mark.parametrize(
    ("shard", "shards", "top_k", "groups", "few"),
    [
        *((0, 8, 3, 1, False), (1, 8, 3, 1, True), (1, 4, 3, 1, False)),
        *((7, 8, 8, 8, True), (7, 8, 8, 1, False), (7, 16, 8, 1, True), (3, 4, 8, 8, False)),
    ],
)
def test_rows_are_picked_where_few_are_needed(shard, shards, top_k, groups, few):
    """Half of the groups for a row; the first shard has the shared experts."""
    router = Mock(groups=groups, top_groups=max(1, groups // 2))
    role = Mock(contract=Mock(layers=("dense", "moe"), instances=shards, top_k=top_k))
    role.config.layer = lambda at: Mock(ffn=Mock(d_ff=5, router=router if at else None))
    assert shard_links._needs_few(role, shard) == few


def test_each_link_has_its_shard_s_workers_and_names_the_shard(monkeypatch):
    monkeypatch.setattr(shard_links, "_needs_few", lambda *_: False)
    role = Mock(_replace=lambda instance: instance)
    role.deployment.ffn, role.deployment.link.addresses = Mock(instances=2, processes=0), [*"abcd"]
    made = [(one.own, one.wanted) for one in links(role, lambda _, own: Mock(own=own)).clients]
    assert made == [([*own], f"ffn worker of shard {at}") for at, own in enumerate(("ac", "bd"))]
