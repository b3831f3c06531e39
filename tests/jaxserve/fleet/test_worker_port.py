"""A worker's port for routers, over real connections: what ends or stalls one of them, or all."""

import contextlib
import math
import resource
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from jaxserve.engine.request import SamplingParams
from jaxserve.fleet import worker_frames as frames
from jaxserve.fleet import worker_port
from jaxserve.fleet.kept_requests import OnOutput
from jaxserve.fleet.request_frames import NO_GRAMMAR, Cancel, GrammarOf, Outputs
from jaxserve.fleet.worker_connections import WorkerConnection
from jaxserve.link.session.channel import dial, split_address
from jaxserve.link.session.messages import Echo, Join, encode
from tests.jaxserve.fleet.fake_worker import MODEL, TOKEN, FakeWorker
from tests.jaxserve.fleet.test_router import SECONDS
from tests.jaxserve.link.session.test_listener import ENDS, closed_ends  # noqa: F401
from tests.jaxserve.waiting import failing_once, until

GRAMMAR = GrammarOf("a grammar")


class Router:
    """A router's end of a connection, frame by frame."""

    def __init__(self, worker: FakeWorker):
        self._channel = dial(worker.address, TOKEN, SECONDS, frames.WORKER_FRAME_BYTES)
        ENDS.append(self._channel)
        self.send(Join(frames.hello_of("router r", MODEL)))
        assert isinstance(self.receive(), frames.Welcome)

    def send(self, message: msgspec.Struct) -> None:
        self._channel.send(encode(message))

    def receive(self) -> Any:
        assert self._channel.wait(SECONDS)
        return WorkerConnection.decode(self._channel.receive())

    def until_taken(self) -> None:
        """The worker has taken every frame before this one."""
        self.send(Echo(7))
        while self.receive() != Echo(7):
            pass

    def submit(self, name: str, grammar: GrammarOf = NO_GRAMMAR, **options: Any) -> None:
        params = SamplingParams(max_tokens=3, seed=1)
        self.send(frames.Submit(name, frames.packed([1, 2, 3]), params, grammar, **options))

    def end_of(self, name: str) -> Any:
        """The last output of a request, or its refusal."""
        while True:
            match self.receive():
                case Outputs(outputs=outputs):
                    for output in outputs:
                        if output.request_id == name and output.finish_reason is not None:
                            return output
                case frames.Rejected(request_id=request_id) as rejected if request_id == name:
                    return rejected

    def leave(self) -> None:
        self._channel.close()


@contextlib.contextmanager
def a_worker(**options: Any) -> Iterator[FakeWorker]:
    worker = FakeWorker("domain", **options)
    try:
        yield worker
    finally:
        worker.close()


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """This process can open nothing more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # the first three are always open
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_worker_that_ran_out_of_descriptors_is_reached_again(caplog) -> None:
    with a_worker() as worker, socket.socket() as stranger:
        with no_descriptors():
            stranger.connect(split_address(worker.address))
            until(lambda: "cannot be accepted" in caplog.text)
        Router(worker).leave()


def test_a_worker_that_could_start_no_thread_is_reached_again(monkeypatch) -> None:
    with a_worker() as worker:
        error = RuntimeError("can't start new thread")
        failed = failing_once(
            *(monkeypatch, threading.Thread, "start", error),
            lambda thread: getattr(thread, "_args", ()),  # a connection's
        )
        with contextlib.suppress(EOFError, OSError):
            Router(worker).leave()
        assert failed.is_set()
        Router(worker).leave()


def test_outputs_say_which_tokens_they_bring() -> None:
    with a_worker() as worker:
        router = Router(worker)
        router.submit("x", emitted=frames.packed([8, 9]))
        assert router.end_of("x").offset == 2
        worker.engine.allowed = 1
        router.submit("y", keyed=True)
        until(lambda: [one.sent for one in worker.engine.running.values()] == [1])
        router.leave()
        until(lambda: worker.port.kept.orphans == ["y"])
        other = Router(worker)
        other.send(frames.Adopt("y", frames.packed([1, 2, 3])))
        worker.engine.allowed = 10
        assert other.end_of("y").offset == 2


@pytest.mark.parametrize("meanwhile", ["cancel", "withdraw", "leave"])
@pytest.mark.parametrize("waits", [False, True])
def test_what_is_not_wanted_any_more_while_its_grammar_is_restored(meanwhile, waits) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def restore(grammar: GrammarOf, vocab: int) -> None:
        begun.set()
        assert goes_on.wait(SECONDS)

    with a_worker(restore=restore) as worker:
        worker.engine.allowed = 1
        router = Router(worker)
        if waits:  # behind another one
            router.submit("first", GRAMMAR)
        router.submit("x", GRAMMAR)
        assert begun.wait(SECONDS)
        match meanwhile:
            case "cancel":
                router.send(Cancel("x"))
            case "withdraw":
                router.send(frames.Withdraw("x"))
            case _:
                router.leave()
                until(lambda: not worker.port._routers)
        if meanwhile != "leave":
            router.until_taken()
        goes_on.set()
        if meanwhile == "cancel":
            assert router.end_of("x").finish_reason == "cancelled"
        elif meanwhile == "withdraw":
            assert isinstance(router.end_of("x"), frames.Rejected)
        worker.port.compiling.submit(lambda: None).result(SECONDS)
        assert set(worker.engine.running) <= {"first"}
        if meanwhile == "leave":
            until(lambda: worker.engine.idle)
        else:
            until(lambda: router_count(worker) == waits)


def router_count(worker: FakeWorker) -> int:
    (router,) = worker.port._routers
    return router.count


def test_a_grammar_for_which_no_thread_can_be_started(monkeypatch) -> None:
    """The request is refused, for another worker: it would never be answered here."""
    with a_worker() as worker:
        router = Router(worker)
        start = threading.Thread.start

        def fails(thread: threading.Thread) -> None:
            if thread.name.startswith("grammars"):
                raise RuntimeError("can't start new thread")
            start(thread)

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fails)
            router.submit("x", GRAMMAR)
            assert router.end_of("x").refusal.kind == "OverloadedError"
        router.submit("y", GRAMMAR)  # the pool does what it could not do then
        assert router.end_of("y").finish_reason == "length"
        assert not worker.engine.submits[1:]


def test_time_for_a_grammar_counts_against_the_deadline() -> None:
    goes_on = threading.Event()
    with a_worker(restore=lambda grammar, vocab: goes_on.wait(SECONDS)) as worker:
        router = Router(worker)
        router.submit("x", GRAMMAR, seconds=0.05)
        router.until_taken()
        assert not goes_on.wait(0.06)
        goes_on.set()
        assert router.end_of("x").finish_reason == "cancelled"


def test_requests_that_end_while_their_router_leaves(monkeypatch) -> None:
    """The engine's thread ends some of them while the others are cancelled."""
    with a_worker() as worker:
        worker.engine.gate.clear()
        router = Router(worker)
        for n in range(6):
            router.submit(f"{n}")
        until(lambda: len(worker.engine.running) == 6)
        left = worker.port.kept.left

        def ends_another(receiver: OnOutput) -> set[str]:
            worker.engine.cancel("5")
            return left(receiver)

        monkeypatch.setattr(worker.port.kept, "left", ends_another)
        router.leave()
        until(lambda: worker.engine.idle)


def test_states_go_on_after_one_that_could_not_be_made(monkeypatch) -> None:
    monkeypatch.setattr(worker_port, "STATE_SECONDS", 0.01)
    with a_worker() as worker:
        router = Router(worker)
        router.until_taken()
        failed = failing_once(monkeypatch, worker.engine, "load", KeyError("a defect"))
        assert failed.wait(SECONDS)
        router.until_taken()
        while not isinstance(router.receive(), frames.State):
            pass


def test_a_kept_request_that_ends_while_it_is_adopted_is_not_counted() -> None:
    """The last output comes before the router is told anything."""
    with a_worker() as worker:
        worker.engine.allowed = 1
        first = Router(worker)
        first.submit("x@first.1", keyed=True)
        until(lambda: worker.port._routers and worker.engine.running)
        first.leave()
        until(lambda: worker.port.kept.orphans)
        adopt = worker.port.kept.adopt

        def ends_at_once(*given: Any) -> Any:
            found = adopt(*given)
            worker.engine.cancel("x@first.1")
            return found

        worker.port.kept.adopt = ends_at_once  # type: ignore[method-assign]
        second = Router(worker)
        second.send(frames.Adopt("x@first.1", frames.packed([1, 2, 3])))
        assert second.end_of("x@first.1").finish_reason == "cancelled"
        second.until_taken()
        assert router_count(worker) == 0


def test_outputs_that_cannot_be_sent_end_the_connection() -> None:
    """Otherwise their router would wait for ever."""
    with a_worker() as worker:
        router = Router(worker)
        router.until_taken()
        (connection,) = worker.port._routers
        connection.post(frames.Pipeline(object()))  # type: ignore[arg-type]
        until(lambda: connection.failure)
        until(lambda: not worker.port._routers)


@pytest.fixture
def told(monkeypatch) -> Iterator[tuple[FakeWorker, list[bool]]]:
    """A stand-in that has been one for long, and what it was told to become."""
    monkeypatch.setattr(worker_port, "AGREED_SECONDS", 60.0, raising=False)
    found: list[bool] = []
    with a_worker() as worker:
        worker.port.on_become = lambda order: found.append(order.domain)
        worker.port._opened = -math.inf
        yield worker, found


def test_a_stand_in_goes_back_when_every_router_can_do_without_it(told) -> None:
    """Routers that see different domains would have it start again and again otherwise."""
    worker, found = told
    first, second = Router(worker), Router(worker)
    second.until_taken()
    for _ in range(3):
        first.send(frames.Become(False, "enough domains"))
        first.until_taken()
    assert found == []
    assert not worker.port.drain
    second.send(frames.Become(False, "enough domains"))
    second.until_taken()
    assert found == [False]


def test_the_welcome_is_the_first_frame_a_router_gets(told, monkeypatch) -> None:
    def slow(self: worker_port.RouterConnection, frame: msgspec.Struct) -> None:
        if isinstance(frame, frames.Welcome):
            time.sleep(0.2)  # the thread that sends the worker's states is faster
        send(self, frame)

    send = worker_port.RouterConnection.send
    monkeypatch.setattr(worker_port.RouterConnection, "send", slow)
    Router(told[0])


@pytest.mark.parametrize("why", ["an old word", "just started"])
def test_a_stand_in_waits_for_the_word_of_all(told, monkeypatch, why) -> None:
    worker, found = told
    first = Router(worker)
    if why == "an old word":
        second = Router(worker)
        second.send(frames.Become(False, "enough domains"))
        second.until_taken()
        monkeypatch.setattr(worker_port, "AGREED_SECONDS", 0.0, raising=False)
    else:
        worker.port.open(worker.engine)
    first.send(frames.Become(False, "enough domains"))
    first.until_taken()
    assert found == []
    first.send(frames.Become(True, "1 of 2 domains"))  # one that lacks domains is enough
    first.until_taken()
    assert found == [True]
