"""A hedged link in virtual time: the real client and connections, and two holders that fail."""

import contextlib
import heapq
import itertools
import weakref
from collections import deque
from functools import partial
from random import Random
from types import SimpleNamespace
from unittest.mock import patch

import jax
import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh

from jaxserve.clock import AwakeClock
from jaxserve.link.remote import client, connection, frames, hedging
from jaxserve.link.remote.peer import RETRY_SECONDS, PeerState
from jaxserve.link.session import session
from jaxserve.link.session.channel import TICK_SECONDS, Channel, Deadlines
from jaxserve.link.session.hello import make_hello
from jaxserve.link.session.messages import Bulk, Echo, Ready, encode

DEADLINES = Deadlines(handshake=1, probe=0.25, suspect=1.5, down=3, answer=4, absent=30)
LANES, ROUNDS = 3, 30
SLOW = 0.3
SLACK = hedging.PAUSE_SECONDS + hedging.LATE * SLOW + 2 * TICK_SECONDS
"""Longest wait, in seconds, that a fault costs beyond its own time."""
KINDS = st.sampled_from(["kill", "stop", "cut", "lose"])
FAULTS = st.lists(st.tuples(st.floats(0, 8), st.integers(0, 1), KINDS, st.floats(0, 6)), max_size=8)
notes = msgspec.msgpack.Decoder(frames.Note | Echo)


class Message(SimpleNamespace):
    """A message of one piece on the attention mesh."""

    __class__ = jax.Array

    def __init__(self, rows):
        super().__init__(addressable_shards=[SimpleNamespace(data=rows)])


class Line(Channel):
    """The channel and the transfers of one connection."""

    unread = b""

    def __init__(self, world, holder):
        self.world, self.holder, self.inbox, self.dead = world, holder, deque(), False

    def send(self, frame, parts=(), needed=None):
        if self.dead:
            raise OSError("gone")
        body = frame(Bulk(0, None)) if parts else frame
        self.holder.take(self, notes.decode(body), parts)

    def wait(self, seconds):
        self.world.advance(seconds, lambda: self.inbox or self.dead)
        if self.dead:
            raise EOFError
        return bool(self.inbox)

    def shutdown(self):
        self.dead = True

    def at_once(self, arrays):
        """The other half leaves later, as from the sender's thread."""
        if not (here := self.world.random.random() < 0.5):
            self.world.at(self.world.random.uniform(0, 0.02), self.send_waiting)
        return here

    def send_waiting(self):
        end = self.end()
        while end is not None and not end._to_send.empty():
            if (message := end._to_send.get()) and end.failure is None:
                end._send_one(message)

    def receive(self, *rows):
        """A frame, or the rows behind it."""
        if not rows:
            frame, self.number, self.rows = self.inbox.popleft()
            return frame
        self.world.read.setdefault(self.number, self.world.now)
        return [self.rows]


class Holder:
    """Answers `2 x + layer`: in any order, late, and at times twice."""

    def __init__(self, world):
        self.world, self.until, self.lossy, self.line, self.taken = world, 0.0, False, None, []

    def take(self, line, note, parts):
        if isinstance(note, frames.Note) and self.lossy:
            self.lossy = False
            return
        self.taken.append((line, note, parts))
        self.world.at(self.world.random.choice([0.002, 0.004, 0.004, 0.01, SLOW]), self.answer)

    def answer(self):
        if self.until > self.world.now:
            return self.world.at(self.until - self.world.now, self.answer)
        if self.taken:
            line, note, parts = self.taken.pop(self.world.random.randrange(len(self.taken)))
            frame, number, rows = encode(note), -1, None
            if parts:
                number, rows = note.number, 2 * parts[0] + note.layer
                frame = encode(Ready(number, Bulk(0, None)))
            line.inbox.extend([(frame, number, rows)] * (1 + (self.world.random.random() < 0.02)))

    def fail(self, kind, seconds):
        if kind in ("kill", "stop"):
            self.until = max(self.until, self.world.now + seconds)
        self.lossy |= kind == "lose"
        if kind in ("kill", "cut"):
            self.taken.clear()
            if self.line is not None:
                self.line.dead = True


class World:
    """Virtual time, with the work of the peers' threads."""

    def __init__(self, random):
        self.random, self.now, self.events, self.order = random, 0.0, [], itertools.count()
        self.read: dict[int, float] = {}
        """Message → when its first answer was read."""
        self.holders = [Holder(self), Holder(self)]
        self.link = hedging.HedgedClient(
            ["a:1", "b:1"],
            make_hello("attention", {}),
            "",
            domain="d",
            transport="",
            mesh=Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("dp", "tp")),
            answer_piece=lambda kind, rows: jax.ShapeDtypeStruct((1,), "int32"),
            rows=[1],
            deadlines=DEADLINES,
        )
        self.link._usual = 0.004  # before it is known, lost messages wait for `answer` seconds
        self.link._answer_shape = lambda *_: connection.AnswerShape(
            [None], lambda rows: jax.device_put(rows[0])
        )
        self.link._changed = changed = contextlib.nullcontext()
        changed.notify_all, changed.wait = lambda: None, self.advance
        for peer, holder in zip(self.link.peers, self.holders, strict=True):
            self.connect(peer, holder)
        self.tick()

    def at(self, seconds, action):
        heapq.heappush(self.events, (self.now + seconds, next(self.order), action))

    def advance(self, seconds, done=lambda: False):
        end = self.now + seconds
        while seconds > 0 and not done():
            if self.events[0][0] > end:
                self.now = end
                return
            self.now, _, action = heapq.heappop(self.events)
            action()

    def connect(self, peer, holder):
        if holder.until > self.now:
            return self.at(RETRY_SECONDS, partial(self.connect, peer, holder))
        holder.line = line = Line(self, holder)
        end = connection.MessageConnection(line, DEADLINES, "", peer._allowed)
        line.end = weakref.ref(end)
        end.places = end._own = (0,)
        peer.connection = end
        peer._become(PeerState.UP, "")

    def tick(self):
        self.at(TICK_SECONDS, self.tick)
        for peer, holder in zip(self.link.peers, self.holders, strict=True):
            if (end := peer.connection) is None:
                continue
            holder.line.send_waiting()  # messages of a lost connection, as the sender's thread does
            if not end._reading.locked():
                end.read_frame(0.0)
            if end.failure is not None:
                peer._become(PeerState.DOWN, end.failure)
                peer.connection = None
                self.at(RETRY_SECONDS, partial(self.connect, peer, holder))


@contextlib.contextmanager
def world_of(random):
    world = SimpleNamespace(now=0.0)
    clock = SimpleNamespace(monotonic=lambda: world.now)
    ticking = partial(AwakeClock, clock=clock.monotonic)
    with contextlib.ExitStack() as stack:
        for module in (client, session):
            stack.enter_context(patch.object(module, "AwakeClock", ticking))
        for module in (connection, hedging):
            stack.enter_context(patch.object(module, "time", clock))
        stack.enter_context(patch.object(connection, "opens", lambda _: lambda line: line))
        world = World(random)
        yield world


def test_the_standby_of_a_late_shard_is_asked_and_nobody_s_where_an_answer_waits_unread():
    """Before the shard is suspected, and without giving it up."""
    draws = {"random": lambda: 0.1, "choice": min, "randrange": lambda count: 0}
    with world_of(SimpleNamespace(**draws)) as world:
        link = world.link
        world.advance(hedging.PAUSE_SECONDS)
        for step, resends in enumerate((0, 2, 2)):
            if step == 1:
                world.holders[0].fail("stop", 60.0)
            for lane in (0, 1):
                link.send(lane, "moe", 3, 1, Message(np.array([lane])))
            world.advance(0.09)
            assert [int(link.receive(lane)[0]) for lane in (0, 1)] == [3, 5]
            assert (link.counters.resends, link.counters.failures) == (resends, 0)
        assert world.now < hedging.PAUSE_SECONDS + 0.4


@given(st.integers(0, 1 << 32), FAULTS)
def test_every_message_gets_its_own_answer_in_time_whatever_the_holders_do(seed, faults):
    """A second answer is dropped, and nothing of a message stays."""
    random = Random(seed)  # faster than Hypothesis's own
    with world_of(random) as world:
        link, sent, arrays = world.link, {}, []
        for pause, holder, kind, seconds in faults:
            world.at(pause, partial(world.holders[holder].fail, kind, seconds))
        for number in range(LANES * ROUNDS):
            lane, layer = number % LANES, random.randrange(4)
            if lane in sent:
                begun, (before, before_layer) = world.now, sent[lane]
                assert link.receive(lane) == 2 * before + before_layer
                whole = min(holder.until for holder in world.holders)
                assert world.now <= max(begun, whole) + SLACK * (1 + len(faults))
                assert world.now <= max(begun, world.read[before]) + TICK_SECONDS
            rows, sent[lane] = np.array([number]), (number, layer)
            arrays.append(weakref.ref(rows))
            link.send(lane, "moe", layer, 1, Message(rows))
            del rows
            world.advance(random.choice([0, 0, 0, 0.05, 0.5]))
        for lane, (one, layer) in sent.items():
            assert link.receive(lane) == 2 * one + layer
        assert link.counters.messages == LANES * ROUNDS
        world.advance(2 * DEADLINES.answer + 12)
        assert link._usable()
        assert not link._unanswered
        assert not any(peer.connection._posted or peer.connection._due for peer in link.peers)
        assert not any(one() is not None for one in arrays)
