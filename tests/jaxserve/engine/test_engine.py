"""The loop around scheduler and driver, on a driver without devices; see `test_serving.py` too."""

import inspect
import threading
import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from jaxserve.engine.request import SamplingParams
from jaxserve.errors import DrainingError, EngineFailedError, InvalidRequestError, OverloadedError
from tests import golden
from tests.jaxserve.engine.fake_driver import FakeDriver, fake_engine
from tests.jaxserve.layouts import Collector, Output, ask, idle
from tests.jaxserve.waiting import until

LONG = SamplingParams(max_tokens=40)


def submitted(engine, params=LONG, count=1):
    """The collector of requests with a prompt of one token."""
    collector = Collector()
    for _ in range(count):
        collector.submit(engine, [1], params)
    return collector


class Everything:
    """A grammar without rules."""

    finished = False

    def __init__(self, words=None):
        self.words = np.full(32, 2**32 - 1, np.uint32) if words is None else words

    def mask(self):
        return self.words

    def accept(self, token_id): ...


@pytest.fixture
def make():
    """Engines that are closed at the end, whatever became of them."""
    engines = []

    def make(*, start=True, held=False, **options):
        engine, driver = fake_engine(**options)
        engines.append((engine, driver))
        if held:  # steps give no results until the gate is set
            driver.gate.clear()
        if start:
            engine.start()
        return engine, driver

    yield make
    for engine, driver in engines:
        driver.gate.set()
        engine.close()


class TestRequests:
    def test_more_than_slots(self, make):
        engine, _ = make(overrides={"lanes": 2, "attention.dp": 2, "scheduler.max_waiting": 50})
        collector = Collector()
        for length in range(1, 31):
            params = SamplingParams(max_tokens=1 + length % 7)
            collector.submit(engine, [1] * length, params)
        outputs = collector.wait()
        for length in range(1, 31):
            expected = list(range(length, length + 1 + length % 7))
            assert outputs[f"request {length - 1}"] == Output(expected, "length")
        idle(engine)

    def test_an_id_and_a_grammar_belong_to_one_request_at_a_time(self, make):
        engine, driver = make(held=True)
        collector, params = Collector(), SamplingParams(max_tokens=3, grammar=Everything())
        collector.submit(engine, [1, 2], params, request_id="a")
        with pytest.raises(InvalidRequestError, match="request_id: 'a' is running already"):
            engine.submit([1], LONG, print, request_id="a")
        with pytest.raises(InvalidRequestError, match="grammar: is another running request's"):
            engine.submit([1], params, print)
        driver.gate.set()
        assert collector.wait() == {"a": Output([2, 3, 4], "length")}
        idle(engine)
        assert ask(engine, [1], params, request_id="a") == Output([1, 2, 3], "length")


class TestBadRequests:
    def test_are_refused_and_nobody_notices(self, make):
        engine, _ = make()
        collector = Collector()
        collector.submit(engine, [1, 2], SamplingParams(max_tokens=30))

        def call(prompt, **params):
            engine.submit(prompt, SamplingParams(**params), print, request_id="bad")

        golden.check_arguments("engine/bad_requests.txt", InvalidRequestError, call, globals())
        assert collector.wait()["request 0"] == Output([*range(2, 32)], "length")
        idle(engine)

    def test_ids_of_numpy_become_plain_ones(self, make):
        """Step plans go to other processes, and msgpack knows no NumPy."""
        plans = []
        engine, _ = make(followers=SimpleNamespace(broadcast=lambda new, *_: plans.extend(new)))
        assert ask(engine, list(np.arange(3)), SamplingParams(max_tokens=1)) == Output(
            [3], "length"
        )
        assert msgspec.msgpack.encode(plans)

    @pytest.mark.parametrize("prompt", ["abc", [1, None], [1.0], [[1]]], ids=str)
    def test_what_is_no_token_id(self, make, prompt):
        engine, _ = make()
        submit = inspect.unwrap(type(engine).submit)  # without the tests' check of types
        with pytest.raises(InvalidRequestError, match=r"prompt\[[01]\]: .* is no token id"):
            submit(engine, prompt, LONG, lambda output: None)


class TestOneStepAhead:
    def test_the_next_step_is_enqueued_before_the_last_one_is_read(self, make):
        engine, driver = make(held=True)
        collector = submitted(engine, SamplingParams(max_tokens=3))
        until(lambda: driver.count("advance") == 2)
        time.sleep(0.05)
        assert driver.log == [("begin", 0), ("advance", 0), ("begin", 1), ("advance", 1)]
        driver.gate.set()
        assert collector.wait()["request 0"] == Output([1, 2, 3], "length")

    def test_followers_hear_of_every_boundary_before_the_driver(self, make):
        heard = []

        def broadcast(plans, measured, actions):
            heard.append(([plan.number for plan in plans], list(driver.log)))

        engine, driver = make(
            followers=SimpleNamespace(broadcast=broadcast), overrides={"lanes": 2}
        )
        collector = submitted(engine, SamplingParams(max_tokens=3), 3)
        assert [output.finish_reason for output in collector.wait().values()] == ["length"] * 3
        numbers = [number for plans, _ in heard for number in plans]
        assert numbers == sorted(numbers) == [n for event, n in driver.log if event == "begin"]
        for plans, before in heard:
            assert not {("begin", number) for number in plans} & set(before)


class TestCancel:
    @pytest.mark.parametrize("started", [True, False], ids=["running", "waiting"])
    def test_returns_pages(self, make, started):
        engine, _ = make(pace=0.002)
        collector = Collector()
        for number in range(3):  # two slots: the third waits
            collector.submit(engine, [1] * 5, LONG, request_id=str(number))
        victim = "0" if started else "2"
        collector.wait_for_tokens("0", 3)
        engine.cancel(victim)
        outputs = collector.wait()
        assert outputs[victim].finish_reason == "cancelled"
        assert 3 <= len(outputs["0"].token_ids) < 40 if started else not outputs["2"].token_ids
        others = [outputs[str(n)] for n in range(3) if str(n) != victim]
        assert others == [Output([*range(5, 45)], "length")] * 2
        idle(engine)

    def test_between_submit_and_the_loop(self, make):
        """Both before the loop looked: the request ends without a step."""
        engine, driver = make(held=True)
        collector = submitted(engine)
        until(lambda: driver.count("advance") == 2)  # the loop waits for a result now
        collector.submit(engine, [1], LONG, request_id="a")
        engine.cancel("a")
        driver.gate.set()
        assert collector.wait()["a"] == Output([], "cancelled")


class TestDeadline:
    def test_ends_the_request(self, make):
        engine, _ = make(pace=0.02)
        collector = Collector()
        started = time.monotonic()
        collector.submit(engine, [1], LONG, request_id="a", deadline=started + 0.2)
        collector.submit(engine, [1], LONG, request_id="b", deadline=started + 60)
        outputs = collector.wait()
        assert outputs["a"].finish_reason == "cancelled"
        assert 0 < len(outputs["a"].token_ids) < 40
        assert outputs["b"].finish_reason == "length"
        idle(engine)
        assert not engine._loop._deadlines

    def test_that_has_passed_already(self, make):
        engine, driver = make()
        assert ask(engine, [1], LONG, deadline=time.monotonic() - 1) == Output([], "cancelled")
        assert driver.count("begin") == 0
        idle(engine)


class TestOverload:
    def test_refuses_with_a_time_to_come_back(self, make):
        """Two slots and five places to wait, also for what the loop has not taken yet."""
        engine, driver = make(held=True)
        collector = submitted(engine)
        until(lambda: driver.count("advance") == 2)  # the loop waits for a result
        for _ in range(5):
            collector.submit(engine, [1], LONG)
        with pytest.raises(OverloadedError, match="5 requests wait already") as error:
            engine.submit([1], LONG, print)
        assert error.value.retry_after_s > 0
        driver.gate.set()
        assert {output.finish_reason for output in collector.wait().values()} == {"length"}
        collector.submit(engine, [1], SamplingParams(max_tokens=1), request_id="later")
        assert collector.wait()["later"].finish_reason == "length"
        idle(engine)


class TestDrain:
    def test_finishes_what_runs_and_refuses_the_rest(self, make):
        engine, _ = make(pace=0.005)
        collector = submitted(engine, LONG, 4)
        collector.wait_for_tokens("request 0", 2)
        drained = []
        thread = threading.Thread(target=lambda: drained.append(engine.drain(30)))
        thread.start()
        until(lambda: engine.status == "draining")
        with pytest.raises(DrainingError, match="shutting down and takes no new requests"):
            engine.submit([1], LONG, lambda output: None)
        assert {o.finish_reason for o in collector.wait().values()} == {"length"}
        thread.join(10)
        assert drained == [True]
        assert engine.status == "draining"
        idle(engine)

    def test_says_when_the_time_is_up_and_waits_for_no_cancelled_request(self, make):
        engine, driver = make(held=True)
        collector = submitted(engine, count=2)
        assert engine.drain(0.1) is False
        engine.cancel("request 0")
        driver.gate.set()
        assert engine.drain(20) is True
        outputs = collector.wait()
        assert [output.finish_reason for output in outputs.values()] == ["cancelled", "length"]


class TestClose:
    def test_ends_open_requests_as_cancelled(self, make):
        engine, _ = make(pace=0.005)
        collector = submitted(engine, LONG, 4)
        collector.wait_for_tokens("request 0", 2)
        thread = engine._thread
        engine.start()  # does nothing the second time
        engine.close()
        assert {o.finish_reason for o in collector.wait(1).values()} == {"cancelled"}
        assert engine.status == "closed"
        with pytest.raises(EngineFailedError, match="the engine is closed"):
            engine.submit([1], LONG, lambda output: None)
        engine.close()
        until(lambda: not thread.is_alive())

    def test_before_the_start(self, make):
        engine, _ = make(start=False)
        assert engine.status == "starting"
        with pytest.raises(EngineFailedError, match="the engine is starting"):
            engine.submit([1], LONG, lambda output: None)
        engine.close()
        assert engine.status == "closed"
        with pytest.raises(EngineFailedError, match="the engine is closed"):
            engine.start()

    def test_from_an_output(self, make):
        engine, _ = make()
        ended = threading.Event()

        def on_output(output):
            engine.close()
            if output.finish_reason:
                ended.set()

        engine.submit([1], LONG, on_output)
        assert ended.wait(20)
        assert engine.status == "closed"


class TestReceiverThatRaises:
    def test_loses_its_request_and_nobody_elses(self, make, caplog):
        engine, _ = make()
        collector, calls = Collector(), []

        def on_output(output):
            calls.append(output)
            raise RuntimeError("the client is gone")

        engine.submit([1], LONG, on_output, request_id="bad")
        collector.submit(engine, [1], LONG)
        assert collector.wait()["request 0"] == Output([*range(1, 41)], "length")
        idle(engine)
        assert engine.status == "ready"
        assert 2 <= len(calls) <= 4
        assert calls[-1].finish_reason == "cancelled"
        assert "request bad: its receiver failed" in caplog.text
        engine.submit([1], SamplingParams(max_tokens=1), on_output)  # raises at its last output
        until(lambda: not engine.schedulers[0].has_work)
        idle(engine)
        assert engine.status == "ready"


class TestFailure:
    def failed(self, engine, collector, message):
        """Every open request and every later one hears of it."""
        outputs = collector.wait(10)
        assert {(o.finish_reason, o.error) for o in outputs.values()} == {("error", message)}
        assert engine.status == "failed"
        assert isinstance(engine.failure, EngineFailedError)
        assert str(engine.failure) == message
        for _ in range(2):
            with pytest.raises(EngineFailedError) as error:
                engine.submit([1], LONG, lambda output: None)
            assert str(error.value) == message
        assert engine.drain(0.1) is True
        engine.close()
        assert engine.status == "failed"

    def test_results_that_never_come(self, make):
        engine, _ = make(held=True)
        started = time.monotonic()
        collector = submitted(engine, LONG, 4)
        self.failed(
            engine, collector, "a step's tokens did not arrive within 1.0 s (cluster.step_seconds)"
        )
        assert 1.0 <= time.monotonic() - started < 8

    @golden.table("engine/faults.yaml")
    def test_a_driver_or_a_computation_that_fails(self, make, fault, message, caplog):
        """The error is explained by what is known of other processes, and a defect is logged."""

        def explain(error):
            return EngineFailedError(f"process 1 is gone (then: {error})")

        followers = SimpleNamespace(broadcast=lambda *_: None, explain=explain)
        engine, driver = make(followers=followers, start=False)
        setattr(driver, fault, RuntimeError("device lost"))
        engine.start()
        collector = submitted(engine)
        self.failed(engine, collector, f"process 1 is gone (then: {message})")
        assert fault == "result_fault" or "Traceback" in caplog.text

    def test_programs_that_are_compiled_late(self, make, monkeypatch):
        """Their requests wait for them, and hear at once that they will not come."""
        late, told = SimpleNamespace(takes_options=False, token_budget=128), []
        late.start, late.close = lambda *both: told.extend(both), lambda: None
        monkeypatch.setattr(FakeDriver, "compiler", late, raising=False)
        engine, _ = make()
        collector = submitted(engine, SamplingParams(max_tokens=2, logprobs=1))
        assert ask(engine, [1], SamplingParams(max_tokens=1), request_id="plain").token_ids == [1]
        assert not collector._outputs["request 0"]
        _made, failed = told
        failed(EngineFailedError("compilation after the start: no memory"))
        self.failed(engine, collector, "compilation after the start: no memory")

    def test_told_by_somebody_else_while_the_loop_waits(self, make):
        """A follower is gone: nobody waits for the step's deadline."""
        engine, driver = make(held=True, overrides={"cluster.step_seconds": 60.0})
        collector = submitted(engine)
        until(lambda: driver.count("advance") == 2)
        started = time.monotonic()
        engine.fail(EngineFailedError("process 1: its connection closed"))
        assert engine.status == "failed"
        self.failed(engine, collector, "process 1: its connection closed")
        assert time.monotonic() - started < 8

    def test_before_the_start_and_after_the_end(self, make):
        engine, _ = make(start=False)
        engine.fail(EngineFailedError("process 1: gone"))
        with pytest.raises(EngineFailedError, match="process 1: gone"):
            engine.start()
        engine, _ = make()
        engine.close()
        engine.fail(EngineFailedError("the peer has left"))
        assert (engine.status, engine.failure) == ("closed", None)

    def test_callbacks(self, make, caplog):
        engine, _ = make()
        heard = []

        def bad(error):
            raise ValueError("bad callback")

        engine.add_failure_callback(bad)
        engine.add_failure_callback(heard.append)
        error = EngineFailedError("gone")
        engine.fail(error)
        engine.fail(EngineFailedError("the first one counts"))
        assert heard == [error]
        assert "bad callback" in caplog.text
        engine.add_failure_callback(heard.append)  # too late, and told at once
        assert heard == [error, error]
        for _ in range(3):
            with pytest.raises(EngineFailedError) as later:
                engine.submit([1], LONG, lambda output: None)
            assert later.value is not engine.failure, "errors do not carry each other's stacks"
        assert engine.failure.__traceback__ is None

    def test_books_that_do_not_add_up(self, make, monkeypatch):
        """Checked whenever the loop is idle."""
        engine, _ = make(start=False)

        def broken():
            raise RuntimeError("page pool of 12: lost pages [3]")

        monkeypatch.setattr(engine.schedulers[0], "integrity", broken)
        engine.start()
        until(lambda: engine.status == "failed")
        assert "lost pages [3]" in str(engine.failure)
