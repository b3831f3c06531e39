"""The link between two runtimes: a real ffn process, killed, stopped, replaced, refused."""

import contextlib
import gc
import itertools
import os
import random
import signal
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.errors import ConfigError, EngineFailedError
from jaxserve.link.remote.client import LinkCounters, MessageClient
from jaxserve.link.remote.peer import PeerState
from tests import golden
from tests.jaxserve.link.remote import toy_server as toy
from tests.jaxserve.link.remote.toy_server import Nursery, nursery
from tests.jaxserve.waiting import until

pytestmark = pytest.mark.multihost

LANES, KILLS = 3, 100
KIND = toy.kind_of(4, toy.WORDS)


@pytest.fixture(scope="module")
def toys() -> Iterator[Nursery]:
    with nursery() as opened:
        yield opened


@pytest.fixture(scope="module")
def server(toys: Nursery) -> Iterator[toy.ToyServer]:
    """One for the tests that leave it alive."""
    with toys.servers({}) as [server]:
        yield server


def attention_mesh(devices: int = 4) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]).reshape(devices, 1), ("dp", "tp"))


@contextlib.contextmanager
def client(*running, devices=4, rows=(toy.ROWS,), **options) -> Iterator[MessageClient]:
    addresses = [server.address for server in running]
    link = toy.message_client(addresses, attention_mesh(devices), list(rows), **options)
    try:
        link.connect()
        yield link
    finally:
        link.close()


def values(number: int, devices: int = 4, words: int = toy.WORDS) -> np.ndarray:
    """A message, different for every number."""
    size = toy.ROWS * devices * words
    return (np.arange(size, dtype=toy.WORD) * 7 + number).reshape(-1, words)


def on_mesh(array: np.ndarray, devices: int = 4) -> jax.Array:
    sharding = NamedSharding(attention_mesh(devices), PartitionSpec(("dp", "tp")))
    return jax.device_put(array, sharding)


def exchange(link: MessageClient, number: int, lane: int = 0) -> None:
    """One message and its answer."""
    link.send(lane, KIND, number % 4, toy.ROWS, on_mesh(values(number)))
    check(link, number, lane)


def check(link: MessageClient, number: int, lane: int = 0) -> None:
    answer = link.receive(lane)
    np.testing.assert_array_equal(answer, 2 * values(number) + number % 4)


def test_rows_that_are_not_needed_are_neither_sent_nor_answered(server):
    with client(server) as link:
        link.needed = lambda kind, pieces: [b"\xa0", b"\x80", b"\xf0", b"\x10"][: len(pieces)]
        link.send(0, KIND, 3, toy.ROWS, on_mesh(values(5)))
        rows = [0, 2, 4, 8, 9, 10, 11, 15]
        expected = np.zeros_like(values(5))
        expected[rows] = 2 * values(5)[rows] + 3
        np.testing.assert_array_equal(link.receive(0), expected)


def rounds(link: MessageClient, first: int, count: int) -> None:
    """`count` rounds over all lanes, every lane's message on its way while others are answered."""
    for lane in range(LANES):
        link.send(lane, KIND, first % 4, toy.ROWS, on_mesh(values(first + lane)))
    for number in range(first, first + count):
        for lane in range(LANES):
            answer = link.receive(lane)
            np.testing.assert_array_equal(answer, 2 * values(number + lane) + number % 4)
            if number + 1 < first + count:
                following = on_mesh(values(number + 1 + lane))
                link.send(lane, KIND, (number + 1) % 4, toy.ROWS, following)


def test_nothing_of_a_message_stays_once_it_is_answered(server):
    """A message's memory on the device does not wait for the garbage collector."""
    gc.disable()
    try:
        with client(server) as link:
            message = on_mesh(values(3))
            link.send(0, KIND, 1, toy.ROWS, message)
            answer = link.receive(0)
            references = [weakref.ref(message), weakref.ref(answer)]
            del message, answer
            assert [reference() for reference in references] == [None, None]
            connection = weakref.ref(link.peers[0].connection)
            link.peers[0].connection._lifeline.shutdown()  # as where the process dies
            exchange(link, 4)
            until(lambda: connection() is None)
            until(lambda: link.counters.last_failure.endswith("(the process has ended)"))
    finally:
        gc.enable()


def test_domain_that_the_server_has_to_compile_for_joins_while_another_is_served(toys):
    """However long that takes: the time in which nobody is there does not run."""
    options = {"rows": [toy.UNKNOWN_ROWS], "deadlines": {"absent": 0.5}}
    with toys.servers({"compile_seconds": 2.0}) as [server], client(server) as link:
        answered = threading.Event()

        def join() -> None:
            with client(server, domain="wide", **options) as wide:
                packed = np.ones((4 * toy.UNKNOWN_ROWS, toy.WORDS), toy.WORD)
                wide.send(0, KIND, 1, toy.UNKNOWN_ROWS, on_mesh(packed))
                np.testing.assert_array_equal(wide.receive(0), 2 * packed + 1)
                assert wide.counters.failures == 0
                answered.set()

        thread = threading.Thread(target=join)
        thread.start()
        number = 0
        while thread.is_alive():
            number += 1
            exchange(link, number)
        assert answered.is_set()
        assert link.counters == LinkCounters(messages=number)


@golden.table("link/refused_messages.yaml")
def test_what_does_not_fit_is_refused_by_name(server, options, message):
    with pytest.raises(ConfigError, match=message):
        with client(server, **options):
            pass
    with client(server) as link:
        exchange(link, 0)


def test_message_that_is_still_computed_is_not_late(server):
    """However long the sender's program takes, `send` and the answer's deadline do not mind."""

    @jax.jit
    def slow(x: jax.Array) -> jax.Array:
        numbers = jax.numpy.arange(1 << 12, dtype=toy.WORD)
        numbers = jax.lax.fori_loop(0, 9000, lambda _, y: jax.numpy.sort(-y), numbers)
        return x + numbers[0]  # 0 again, after a second or more

    ready = on_mesh(values(5, 1), 1)
    slow.lower(ready).compile()
    with client(server, devices=1, deadlines={"answer": 0.3}) as link:
        begin = time.monotonic()
        packed = slow(ready)
        link.send(0, toy.kind_of(1, toy.WORDS), 1, toy.ROWS, packed)
        assert not packed.is_ready()
        np.testing.assert_array_equal(link.receive(0), 2 * values(5, 1) + 1)
        assert time.monotonic() - begin > 0.3
        assert link.counters == LinkCounters(messages=1)


def test_message_that_is_an_error_is_raised_and_other_lanes_go_on(server):
    kind = toy.kind_of(1, toy.WORDS)
    with client(server, devices=1) as link:
        gone = on_mesh(values(5, 1), 1)
        gone.delete()
        link.send(0, kind, 1, toy.ROWS, gone)
        with pytest.raises((RuntimeError, TypeError)):
            link.receive(0)
        link.send(1, kind, 1, toy.ROWS, on_mesh(values(6, 1), 1))
        np.testing.assert_array_equal(link.receive(1), 2 * values(6, 1) + 1)
        assert link.counters == LinkCounters(messages=1)


def open_ports(pid: int) -> set[int]:
    """Ports on which a process listens."""
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    tables = "".join(Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6"))
    table = [line.split() for line in tables.splitlines()]
    return {
        int(row[1].rpartition(":")[2], 16)
        for row in table
        if row[3] == "0A" and f"socket:[{row[9]}]" in links
    }


def kept(pid: int) -> tuple[int, int]:
    """Open files and threads of a process."""
    return tuple(sum(1 for _ in Path(f"/proc/{pid}/{of}").iterdir()) for of in ("fd", "task"))


def test_strangers_at_open_ports_stop_nothing_and_leave_nothing(server):
    """Four zero bytes, noise, half a handshake, and idle connections that are held."""
    before = open_ports(os.getpid())
    with client(server) as link:
        assert open_ports(os.getpid()) <= before  # another test's may have closed since
        (port,) = open_ports(server.pid)
        exchange(link, 0)
        settled = kept(server.pid)
        with contextlib.ExitStack() as held:
            for number in range(100):
                stranger = socket.create_connection(("127.0.0.1", port))
                held.callback(stranger.close)
                said = [b"\0\0\0\0", os.urandom(4096), b"\0\0\0\x14", b""][number % 4]
                with contextlib.suppress(OSError):
                    stranger.sendall(said)
                rounds(link, number, 1)
            with client(server, domain="late") as late:
                exchange(late, 1)
        until(lambda: kept(server.pid) == settled)
        rounds(link, 0, 3)
        assert link.counters.failures == 0


@pytest.mark.nightly
@pytest.mark.parametrize("standby", [False, True])
def test_a_storm_of_kills_under_load(toys, standby):
    """Every answer is right, and no lane waits longer than `absent`. Without a standby every fifth
    server is killed again before or while it meets the client."""
    draw = random.Random(standby)
    with toys.servers(*[{}] * (1 + standby)) as started, client(*started) as link:
        by_address = {server.address: server for server in started}

        def kill() -> None:
            for _ in range(KILLS):
                until(lambda: all(peer.state is PeerState.UP for peer in link.peers))
                time.sleep(draw.uniform(0.0, 0.2))
                until(lambda: toy.in_use(link) is not None)
                server = by_address[toy.in_use(link)]
                server.end(signal.SIGKILL)
                server.start()
                if not standby and draw.random() < 0.2:
                    time.sleep(draw.uniform(0.0, 0.6))
                    server.end(signal.SIGKILL)
                    server.start()
                until(lambda: link.counters.failures > len(killed) and toy.in_use(link) is not None)
                killed.append(server)

        killed: list[toy.ToyServer] = []
        with ThreadPoolExecutor(1) as pool:
            storm = pool.submit(kill)
            for number in itertools.takewhile(lambda _: not storm.done(), itertools.count()):
                rounds(link, number, 3)
            storm.result()
        assert link.counters.failures >= len(killed) == KILLS


def test_servers_end_in_order_hand_over_and_then_nobody_is_there(toys):
    with toys.servers({}, {}) as started, client(*started, deadlines={"absent": 2.0}) as link:
        until(lambda: all(peer.state is PeerState.UP for peer in link.peers))
        started.sort(key=lambda server: server.address != toy.in_use(link))
        first, second = started
        begin = time.monotonic()
        first.send_signal(signal.SIGTERM)
        for number in itertools.count():  # at least one round after the other has taken over
            taken = toy.in_use(link) == second.address
            rounds(link, number, 1)
            if taken:
                break
        assert time.monotonic() - begin < 2.0
        assert first.end(0) == 0
        assert second.end() == 0
        with pytest.raises(EngineFailedError, match=r"for 2 s \(link.absent_seconds\): 127\.0"):
            exchange(link, 1)


@pytest.mark.parametrize("cohorts", [False, True])
def test_domain_that_stops_or_dies_is_forgotten_with_its_arrays_and_others_go_on(toys, cohorts):
    def joined() -> bool:
        return server.report()[0] == ["d0", "doomed"]

    def forgotten() -> bool:
        return server.report()[0] == ["d0"] and server.report()[1] < 1 << 16

    with toys.servers({"cohorts": cohorts}) as [server], client(server) as link:
        doomed = toy.ToyClient(toys, server)
        try:
            until(joined)
            doomed.send_signal(signal.SIGSTOP)
            rounds(link, 0, 3)
            until(forgotten)
            doomed.send_signal(signal.SIGCONT)
            until(joined)
            rounds(link, 10, 3)
        finally:
            doomed.kill()
        rounds(link, 20, 3)
        until(forgotten)
        exchange(link, 30)
        assert link.counters.failures == 0


def test_server_that_lives_but_does_not_answer_is_left_for_the_standby(toys):
    options = {"stuck_layer": 1}, {}
    with toys.servers(*options) as started, client(*started, deadlines={"answer": 0.5}) as link:
        until(lambda: all(peer.state is PeerState.UP for peer in link.peers))
        if toy.in_use(link) != started[0].address:
            link.peers[1].connection.fail("moved by the test")
        for number in (1, 2, 5):
            exchange(link, number)
        assert toy.in_use(link) == started[1].address
        late = "no answer to layer 1 of lane 0 (4 rows a piece) within 0.5 s"
        assert link.counters.last_failure == late


def test_closed_link_lets_nobody_wait(server):
    with client(server) as link:
        server.send_signal(signal.SIGSTOP)
        try:
            link.send(0, KIND, 1, toy.ROWS, on_mesh(values(1)))
            threading.Timer(0.2, link.close).start()
            with pytest.raises(EngineFailedError, match="was closed"):
                link.receive(0)
        finally:
            server.send_signal(signal.SIGCONT)


def test_an_ffn_worker_that_reads_slowly_delays_no_other_thread(monkeypatch):
    link = toy.message_client(["127.0.0.1:1"], attention_mesh(1), [toy.ROWS])
    slow, read = Mock(), threading.Event()
    slow.post.side_effect = lambda message, here: read.wait(30)
    monkeypatch.setattr(link, "_usable", lambda: [slow])
    link._unanswered[0] = Mock(connections=(), error=None, posts=0, whole=False)
    posting = threading.Thread(target=link._post_waiting)
    posting.start()
    until(lambda: slow.post.called)
    assert link._changed.acquire(timeout=10)
    link._changed.release()
    read.set()
    posting.join(10)


def test_standby_takes_over_and_the_killed_one_becomes_the_standby(toys):
    with toys.servers({}, {}) as started, client(*started) as link:
        until(lambda: all(peer.state is PeerState.UP for peer in link.peers))
        started.sort(key=lambda server: server.address != toy.in_use(link))
        first, second = started
        for lane in range(LANES):
            link.send(lane, KIND, lane, toy.ROWS, on_mesh(values(lane)))
        first.end(signal.SIGKILL)
        for lane in range(LANES):
            check(link, lane, lane)
        rounds(link, 100, 2)
        assert toy.in_use(link) == second.address
        assert link.counters.failures == 1
        first.start()
        until(lambda: all(peer.state is PeerState.UP for peer in link.peers))
        assert link.counters.resends >= 1


def test_stopped_server_is_given_up_and_may_come_back(server):
    with client(server) as link:
        exchange(link, 0)
        server.send_signal(signal.SIGSTOP)
        link.send(0, KIND, 1, toy.ROWS, on_mesh(values(1)))
        until(lambda: link.peers[0].state is not PeerState.UP)
        assert link.problems[0].startswith("ffn worker 0: silent for ")
        until(lambda: link.peers[0].state is not PeerState.SUSPECT)
        server.send_signal(signal.SIGCONT)
        check(link, 1)
        assert link.counters.resends == 1
        assert "silent for" in link.counters.last_failure
        assert link.problems == []


def test_work_that_the_server_refuses_is_an_error(server):
    with client(server) as link:
        exchange(link, 2)
        link.send(0, KIND, toy.REFUSED_LAYER, toy.ROWS, on_mesh(values(0)))
        with pytest.raises(EngineFailedError, match=r"refused .*: ValueError: no layer 9 here"):
            link.receive(0)
