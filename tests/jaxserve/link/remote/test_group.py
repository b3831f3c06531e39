"""Servers of several processes: frames come by chance, connections and workers are lost."""

import itertools
from collections import deque
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxserve.errors import EngineFailedError
from jaxserve.link.remote.batching import Turns
from jaxserve.link.remote.frames import Join, NamedMessage
from jaxserve.link.remote.server import MessageServer, _DomainConnection
from jaxserve.link.session.channel import Channel
from jaxserve.link.session.hello import Refusal, make_hello
from jaxserve.link.session.messages import encode

LANES, LAYERS = 2, 3


class Answer(tuple):
    """(domain, number, piece) as an array that is ready."""

    __class__ = jax.Array

    def block_until_ready(self): ...


class Process:
    """A process of an ffn worker: a server whose frames to others wait in queues."""

    def __init__(self, number, holders):
        self.process, self.runs, self.reports, self.orders = number, [], deque(), deque()
        work = Mock(holders=lambda pieces: holders, land=lambda kind, size, pieces: pieces)
        work.run = lambda kind, layer, size, landed: self.run(layer, landed)
        options = {"transport": "pull", "group": self, "policy": Turns(most=4)}
        self.server = MessageServer("127.0.0.1:0", make_hello("ffn", {}), "", work, **options)
        self.report, self.order = self.reports.append, self.orders.append

    def run(self, layer, landed):
        self.runs.append((layer, len(landed)))
        return [[Answer(rows) for rows in message] for message in landed]


class Attention:
    """A process of an attention worker: a piece of each message, one of a lane at a time."""

    def __init__(self, name, piece, pieces):
        self.name, self.piece, self.pieces = name, piece, pieces
        self.at = [0] * LANES  # layers of each lane that are answered

    def message(self, lane, layer):
        return NamedMessage(self.name, self.pieces, layer * LANES + lane, lane, "dense", layer, 8)

    def connect(self, server):
        """Sends again what may be missing: each lane's last answered message and the next one."""
        self.connection = made = Mock(own=(self.piece,))
        made.answer = lambda message, own: self.answered(made, message.what.number, own)
        made.domain = server.admit(made, self.name)
        each = [(lane, at + step) for lane, at in enumerate(self.at) for step in (-1, 0)]
        self.unsent = deque(self.message(*one) for one in each if 0 <= one[1] < LAYERS)

    def answered(self, connection, number, own):
        if connection is not self.connection:
            return  # lost with the connection
        assert own == {self.piece: (self.name, number, self.piece)}
        layer, lane = divmod(number, LANES)
        if layer == self.at[lane]:
            self.at[lane] += 1
            if layer + 1 < LAYERS:
                self.unsent.append(self.message(lane, layer + 1))


class Fleet:
    """Domains of `pieces` processes each, and an ffn worker of `processes` processes."""

    def __init__(self, domains, pieces, processes):
        self.holders = [piece * processes // pieces for piece in range(pieces)]
        self.count = processes
        named = itertools.product((f"d{each}" for each in range(domains)), range(pieces))
        self.attention = [Attention(name, piece, pieces) for name, piece in named]
        self.restart()

    def restart(self):
        """Begins the ffn worker anew, with all connections."""
        self.ffn = [Process(number, self.holders) for number in range(self.count)]
        self.batch = ()  # taken, and about to run
        for one in self.attention:
            one.connect(self.server_of(one))

    def server_of(self, one):
        return self.ffn[self.holders[one.piece]].server

    def lose(self, one):
        """Loses a connection just after a batch was taken, and makes another."""
        lost, one.connection = one.connection, None
        if self.ffn[0].server.passes._policy._waiting and not self.batch:
            self.batch = self.ffn[0].server.passes.take()
        self.server_of(one).left(lost)
        queued = self.ffn[0].server.passes._policy._waiting.values()
        assert all(message.domain.connections for message in queued)
        one.connect(self.server_of(one))

    def deliver(self, choice):
        """Delivers a frame that waits, or takes or runs a batch; returns whether there was one."""
        leader, *followers = self.ffn
        waiting = [one for one in self.attention if one.unsent]
        waiting += [one for one in followers if one.reports or one.orders]
        waiting += [leader] if self.batch or leader.server.passes._policy._waiting else []
        if not waiting:
            return False
        one = waiting[choice % len(waiting)]
        if isinstance(one, Attention):
            what = one.unsent.popleft()
            rows = {one.piece: np.array((one.name, what.number, one.piece), object)}
            self.server_of(one).arrived(one.connection, what, rows, {})
        elif one is leader and not self.batch:
            self.batch = one.server.passes.take()
        elif one is leader:
            one.server._run_pass(self.batch)
            self.batch = ()
            for follower in followers:
                follower.orders += leader.orders
            leader.orders.clear()
        elif one.reports:
            leader.server.reported(one.process, one.reports.popleft())
        else:
            one.server.ordered(one.orders.popleft())
        return True


@given(
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(st.tuples(st.sampled_from("dddddddlr"), st.integers(0, 11)), max_size=80),
)
@example(1, 1, 1, [("d", 0), ("l", 0), ("d", 0), ("d", 1), ("d", 1)])  # again in the queue
@example(1, 1, 1, [("d", 0)] * 5 + [("l", 0), ("d", 1)])  # an old one comes after the next has run
def test_every_process_gets_every_answer(domains, pieces, processes, events):
    """A frame is delivered, a pass run, a connection lost, or the ffn worker begun anew."""
    fleet = Fleet(domains, pieces, processes)
    for event, choice in events:
        if event == "d":
            fleet.deliver(choice)
        elif event == "l":
            fleet.lose(fleet.attention[choice % len(fleet.attention)])
        else:
            fleet.restart()
    while fleet.deliver(0):
        pass
    assert [one.at for one in fleet.attention] == [[LAYERS] * LANES] * len(fleet.attention)
    assert len({tuple(one.runs) for one in fleet.ffn}) == 1, "another order"
    kept = [each._messages for one in fleet.ffn for each in one.server._domains.values()]
    assert all(len(messages) == LANES for messages in kept)


def test_an_order_without_its_rows_is_an_error():
    order = NamedMessage("d0", 2, 0, 0, "dense", 0, 8)
    with pytest.raises(EngineFailedError, match="which has not arrived here"):
        Process(1, [0, 1]).server.ordered(encode([order]))


def test_a_domain_that_left_long_ago_is_forgotten():
    server = Process(1, [1]).server
    for name in "abac":
        connection = Mock(own=(0,))
        connection.domain = server.admit(connection, name)
        server.left(connection)
        connection.domain.left -= server.deadlines.absent * (name == "b")
    assert list(server._domains) == ["a", "c"]


@pytest.mark.parametrize("own", [(2,), (-1, 0), (0, 0), (1, 0)])
def test_pieces_that_a_message_does_not_have_are_refused(own):
    connection = _DomainConnection(Process(0, [0]).server, Mock(Channel))
    with pytest.raises(Refusal, match=r"sends pieces .* of messages of 2 pieces"):
        connection._admit(Join(make_hello("ffn", {}), "d0", 2, (8,), own))
