"""The two ends of a pages link over loopback: order, bounds, refusals, and ends that die."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from jaxserve.chaos.proxy import Proxy
from jaxserve.link import bulk
from jaxserve.link.pages import client as pages_client
from jaxserve.link.pages import server as pages_server
from jaxserve.link.pages.client import PagesClient
from jaxserve.link.pages.frames import CACHE_FORMAT, FetchedPiece, FetchJob
from jaxserve.link.session.channel import Channel
from jaxserve.link.session.hello import make_hello
from jaxserve.ports import free_port
from tests import golden
from tests.conftest import REPOSITORY
from tests.jaxserve.link.pages import toy_holder as toy
from tests.jaxserve.waiting import until

TAKEN = {CACHE_FORMAT: ("", ["int32"])}


@contextlib.contextmanager
def client(**options) -> Iterator[PagesClient]:
    arguments = {"lease_seconds": 0.6, "deadlines": toy.DEADLINES} | options
    opened = PagesClient(
        make_hello("decode", arguments.pop("facts", toy.FACTS), formats=TAKEN),
        arguments.pop("token", toy.SECRET),
        landing=toy.ToyLanding(),
        **arguments,
    )
    try:
        yield opened
    finally:
        opened.close()


@contextlib.contextmanager
def serving(**options) -> Iterator[tuple]:
    holder = toy.ToyHolder()
    server = toy.toy_server(holder, **options)
    try:
        yield server, holder
    finally:
        holder.go.set()
        server.close()


class Taker:
    """Takes a fetch's pieces and checks them."""

    def __init__(self, start: int, stop: int):
        self.start, self.next, self.stop = start, start, stop
        self.failure: tuple[str, bool] | None = None

    def on_piece(self, first: int, tokens: int, piece: FetchedPiece) -> None:
        assert first == self.next
        numbers, wide = map(np.asarray, piece.arrays)
        expected = np.arange(first, first + piece.tokens)
        np.testing.assert_array_equal(numbers, expected)
        np.testing.assert_array_equal(wide, np.repeat(expected[:, None], wide.shape[1], axis=1))
        self.next += tokens
        piece.done()

    def on_failure(self, text: str, mismatch: bool) -> None:
        assert self.failure is None
        self.failure = text, mismatch

    @property
    def ended(self) -> bool:
        return self.failure is not None or self.next == self.stop


def ask(link: PagesClient, server, hand_off: str = "a", start=0, stop=50, tokens=50, **changes):
    source = toy.toy_source(
        changes.get("address", server.address), changes.get("epoch", server.epoch), hand_off, tokens
    )
    taker = Taker(start, stop)
    job = FetchJob(
        changes.get("key", object()),
        source,
        changes.get("prompt", range(tokens)),
        start,
        stop,
        0,
        taker.on_piece,
        taker.on_failure,
    )
    link.fetch(job)
    return taker, source


def ended(link: PagesClient, server, *arguments, **options) -> Taker:
    """A fetch that has ended, one way or the other."""
    taker, _ = ask(link, server, *arguments, **options)
    until(lambda: taker.ended)
    return taker


class TestFetches:
    def test_a_range_arrives_in_order(self):
        with serving() as (server, _), client() as link:
            for start, stop in ((0, 50), (4, 7), (16, 48), (0, 200)):
                fetch = ended(link, server, start=start, stop=stop, tokens=200)
                assert fetch.failure is None
            until(lambda: not server.room.taken)
            until(lambda: server.counters.queued == 0)
            until(lambda: link.counters.transfers == 4)  # counted after the last piece
            assert link.counters.bytes == server.counters.bytes
            padding = 64 - 16  # of the numbers of a piece of four tokens, of which there are four
            assert link.counters.bytes == (52 + 4 + 32 + 200) * toy.TOKEN_BYTES + 4 * padding

    def test_many_at_once_within_the_bound(self):
        """A piece of 16 tokens is all that may be registered."""
        with serving(registered_bytes=16 * toy.TOKEN_BYTES) as (server, _), client() as link:
            takers = [ask(link, server, f"{n}")[0] for n in range(30)]
            most = 0
            while not all(taker.ended for taker in takers):
                most = max(most, server.room.taken)
                time.sleep(0.001)
            assert [taker.failure for taker in takers] == [None] * 30
            assert most <= 16 * toy.TOKEN_BYTES

    @pytest.mark.parametrize("end", ["release", "leave"])
    def test_leases_are_renewed_until_they_are_released_or_left(self, end):
        """All over one connection, however long it is open."""
        with serving() as (server, holder), client(lease_seconds=0.3) as link:
            source = toy.toy_source(server.address, server.epoch, "a", 50)
            link.keep(source)
            until(lambda: holder.renewed)
            (peer,) = link._peers.values()
            (connection,) = peer._connections
            until(lambda: len(holder.renewed) >= 1.2 * toy.DEADLINES.down / (2 * 0.1))
            assert connection.failure is None
            getattr(link, end)(source)
            until(lambda: holder.released == ["a"] * (end == "release"))
            count = len(holder.renewed)
            time.sleep(0.5)
            assert len(holder.renewed) <= count + 1

    def test_a_release_is_said_over_the_next_connection(self):
        with serving() as (server, holder), client(lease_seconds=60.0) as link:
            taker, source = ask(link, server)
            until(lambda: taker.ended)
            (peer,) = link._peers.values()
            for connection in list(peer._connections):
                connection.fail("lost")
            link.release(source)
            until(lambda: holder.released == ["a"])

    def test_cancelled_fetches_are_not_told(self):
        with serving() as (server, holder), client() as link:
            slow, _ = ask(link, server, "slow", key="s")
            waiting, _ = ask(link, server, "slow", key="w")
            queued, _ = ask(link, server, "b", key="q")
            until(lambda: server.counters.queued)
            for key in "swq":
                link.cancel(key)
            holder.go.set()
            ended(link, server, "c")
            assert [each.failure for each in (slow, waiting, queued)] == [None] * 3
            assert queued.next == 0
            until(lambda: not server.room.taken)
            until(lambda: link.counters.queued == 0)


class TestRefusals:
    @golden.table("link/refused_fetches.yaml")
    def test_a_fetch(self, changes, message, mismatch):
        with serving() as (server, _), client() as link:
            if "prompt" in changes:
                changes = {"prompt": range(*changes["prompt"])}
            text, found = ended(link, server, **changes).failure
            assert message in text
            assert found is mismatch
            assert ended(link, server).failure is None  # the next one is not affected

    @golden.table("link/other_workers.yaml")
    def test_a_worker(self, theirs, options, message):
        with serving(**theirs) as (server, _), client(**options) as link:
            text, mismatch = ended(link, server).failure
            assert message in text
            assert mismatch is False, "its request may be computed elsewhere"


def _changing(monkeypatch, pieces: set[int]) -> None:
    """Numbers of pieces, counted from 0, in which a bit is changed on the way."""
    count = itertools.count()

    def changed(channel, *arguments, **options):
        def send(frame, parts):
            if next(count) in pieces:
                other = bytearray(parts[-1])
                other[-1] ^= 4
                parts[-1] = memoryview(other)
            channel.send(frame, parts)

        return bulk.send_arrays(Mock(Channel, send=send), *arguments, **options)

    monkeypatch.setattr(pages_server, "send_arrays", changed)


class TestCorruption:
    """Every piece that is taken is what was read: `Taker` compares all numbers."""

    def test_a_piece_is_fetched_again_over_another_connection(self, monkeypatch, caplog):
        _changing(monkeypatch, {1})
        with serving() as (server, _), client(streams=1) as link:
            assert ended(link, server).failure is None
            assert link.counters.corrupt == 1
            until(lambda: link.counters.transfers)  # counted after the last piece
            assert (link.counters.transfers, link.counters.failures) == (1, 0)
            assert "tokens 16 to 32 are corrupt: checksum" in caplog.text
            until(lambda: len(server._listener._threads) == 1)

    def test_without_checksums_nothing_is_compared(self, monkeypatch):
        def nobody(*_):
            raise AssertionError

        monkeypatch.setattr(bulk, "checksum", nobody)
        with serving(checksums=False) as (server, _), client() as link:
            assert ended(link, server).failure is None

    def test_a_second_time_it_has_failed(self, monkeypatch):
        """Not as a mismatch: its request may be computed elsewhere."""
        _changing(monkeypatch, {*range(100)})
        with serving() as (server, _), client(streams=1) as link:
            taker = ended(link, server)
            assert taker.next == 0
            assert taker.failure is not None
            text, mismatch = taker.failure
            assert "tokens 0 to 16 are corrupt: checksum" in text
            assert mismatch is False
            assert (link.counters.corrupt, link.counters.failures) == (2, 1)

    def test_a_link_that_changes_bits(self, monkeypatch):
        """Whatever they hit: handshakes, frames or pieces. No pause follows where one hangs."""
        monkeypatch.setattr(pages_client, "OPEN_SECONDS", 0.0)
        with serving() as (server, _), client() as link, contextlib.ExitStack() as stack:
            address = f"127.0.0.1:{free_port()}"
            proxy = Proxy(address, server.address)
            stack.callback(proxy.close)
            proxy.disturb("corrupt", 0.1)
            takers = [ask(link, server, f"{n}", address=address)[0] for n in range(20)]
            until(lambda: all(taker.ended for taker in takers), 60)
            failures = [taker.failure for taker in takers if taker.failure is not None]
            assert 0 < len(failures) < 20
            assert not any(mismatch for _, mismatch in failures)
            proxy.disturb("")
            assert ended(link, server, address=address).failure is None


@contextlib.contextmanager
def process() -> Iterator[SimpleNamespace]:
    """A server in a process of its own, with as much as `ask` needs."""
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.jaxserve.link.pages.toy_holder"],
        cwd=REPOSITORY,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as running:
        try:
            assert running.stdout is not None
            address, epoch = running.stdout.readline().split()
            yield SimpleNamespace(address=address, epoch=int(epoch), running=running)
        finally:
            running.kill()


def test_a_worker_that_times_out_is_left_alone_for_a_while(monkeypatch):
    monkeypatch.setattr("jaxserve.link.pages.client.OPEN_SECONDS", 3.0)
    deadlines = msgspec.structs.replace(toy.DEADLINES, suspect=0.2, answer=0.4)
    with serving() as (server, holder), client(deadlines=deadlines) as link:
        slow, _ = ask(link, server, "slow")
        until(lambda: slow.ended)
        assert link.counters.timed_out == {server.address: "no pages within 0.4 s"}
        next_one, _ = ask(link, server)
        assert next_one.failure is not None, "at once"
        assert next_one.failure[0].startswith("not tried for another ")
        holder.go.set()
        until(lambda: ended(link, server).failure is None)
        until(lambda: not link.counters.timed_out)  # forgotten after the last piece


def test_a_saturated_worker_is_told_from_a_dead_link(caplog):
    """The server answers echoes while pages have to wait."""
    deadlines = msgspec.structs.replace(toy.DEADLINES, suspect=0.3)
    with serving() as (server, holder), client(deadlines=deadlines) as link:
        slow, _ = ask(link, server, "slow")
        until(lambda: "is suspect: saturated: it answers, but pages have not come" in caplog.text)
        assert "silent" not in caplog.text
        holder.go.set()
        until(lambda: slow.ended)
        assert slow.failure is None


@pytest.mark.multihost
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_prefill_worker_that_dies_or_stops(how):
    """In the middle of a fetch, then before one: told in time, and nothing is left."""
    threads = threading.active_count()
    deadlines = msgspec.structs.replace(toy.DEADLINES, handshake=4.0)  # nobody's, who is stopped
    with process() as remote, client(deadlines=deadlines) as link:
        assert ended(link, remote).failure is None
        slow, _ = ask(link, remote, "slow")
        time.sleep(0.2)
        remote.running.send_signal(how)
        until(lambda: slow.failure is not None)
        assert slow.failure is not None
        assert slow.failure[1] is False
        late, _ = ask(link, remote)
        until(lambda: late.failure is not None, 40)
        assert link.counters.queued == 0
    until(lambda: threading.active_count() <= threads)


def test_a_piece_that_the_engine_does_not_begin_to_read_takes_no_room(monkeypatch):
    with serving() as (server, holder), client() as link:
        export, calls = holder.export, []

        def fails_once(fetch, reply):
            calls.append(fetch)
            if len(calls) == 1:
                raise KeyError("a defect")
            export(fetch, reply)

        monkeypatch.setattr(holder, "export", fails_once)
        holder.go.set()
        first = ended(link, server)
        assert first.failure is not None
        assert "KeyError: 'a defect'" in first.failure[0]
        second = ended(link, server)
        assert second.failure is None
        until(lambda: server.room.taken == 0)
