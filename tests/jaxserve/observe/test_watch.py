"""When the pipeline is measured, and what becomes of it: a probe and a clock that do as told."""

import threading
import time

import msgspec
import pytest

from jaxserve.errors import EngineFailedError
from jaxserve.observe import watch as module
from jaxserve.observe.probe import Measured
from jaxserve.observe.spans import Span
from jaxserve.observe.timeline import summarise
from jaxserve.observe.view import DomainShare, PipelineView, Transfers
from jaxserve.observe.watch import Watch, domain_shares

MS = 1_000_000


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeProbe:
    """Sees the spans it is given; remembers when it was turned on and off."""

    def __init__(self, measured: Measured):
        self.measured = measured
        self.turned: list[bool] = []
        self.taken = threading.Semaphore(0)

    def turn(self, on: bool) -> None:
        self.turned.append(on)

    def take(self, timeout: float) -> Measured:
        self.taken.release()
        return self.measured

    def close(self) -> None:
        pass


def lane_of_steps(stage, milliseconds, *, offset=0, process=0, steps=5):
    """Steps of 10 ms, one after the other, of which a stage takes so many."""
    return [
        Span(
            *(stage, 0, 0, step, 0, (10 * step + offset + milliseconds) * MS, process),
            (10 * step + offset) * MS,
        )
        for step in range(steps)
    ]


ATTENTION = Measured(lane_of_steps("attend", 6) + lane_of_steps("combine", 1, offset=9))
FFN = Measured(lane_of_steps("dispatch", 1, offset=6) + lane_of_steps("ffn", 2, offset=7))


def measure(watch: Watch, clock: Clock, probe: FakeProbe) -> PipelineView:
    """Goes through one time of measuring."""
    watch.look()
    assert watch.next()
    while watch.next():
        pass
    assert probe.taken.acquire(timeout=10)
    end = time.monotonic() + 10
    while watch._processing:  # the view is there when the watch would measure again
        assert time.monotonic() < end
        time.sleep(0.001)
    clock.now += 1000
    return watch.look()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_nothing_is_measured_unless_somebody_looks(clock: Clock) -> None:
    probe = FakeProbe(ATTENTION)
    watch = Watch(probe, 1, clock=clock)
    for _ in range(100):
        clock.now += 10
        assert not watch.next()
    assert probe.turned == []
    assert watch.look() == PipelineView()
    clock.now += module.LOOK_SECONDS + 1
    assert not watch.next()  # it was too long ago
    watch.close()


def test_some_steps_of_each_lane_and_then_a_rest(clock: Clock) -> None:
    probe = FakeProbe(ATTENTION)
    watch = Watch(probe, 3, clock=clock)
    watch.look()
    assert [watch.next() for _ in range(3 * module.STEPS)] == [True] * 3 * module.STEPS
    clock.now += 2.0  # what it took
    assert not watch.next()
    assert probe.turned == [True, False]
    assert probe.taken.acquire(timeout=10)
    end = time.monotonic() + 10
    while watch._processing:
        assert time.monotonic() < end
        time.sleep(0.001)
    watch.look()
    clock.now += 2 * module.REST_FACTOR - 1
    assert not watch.next()
    clock.now += 2
    assert watch.next()
    watch.close()


def test_who_looks_again_and_again_gets_more(clock: Clock) -> None:
    probe = FakeProbe(ATTENTION)
    watch = Watch(probe, 1, clock=clock)
    watch.look()
    assert watch.next()
    clock.now += 2.0
    while watch.next():
        pass
    assert probe.taken.acquire(timeout=10)
    end = time.monotonic() + 10
    while watch._processing:
        assert time.monotonic() < end
        time.sleep(0.001)
    clock.now += 2 * module.CLOSE_FACTOR - 1
    watch.look()
    assert not watch.next()
    clock.now += 1
    assert watch.next()
    watch.close()


def test_an_idle_engine_ends_it(clock: Clock) -> None:
    probe = FakeProbe(ATTENTION)
    watch = Watch(probe, 3, clock=clock)
    watch.idle()
    assert probe.turned == []
    watch.look()
    assert watch.next()
    watch.idle()
    assert probe.turned == [True, False]
    assert probe.taken.acquire(timeout=10)
    watch.close()


def test_the_figures_of_both_sides(clock: Clock) -> None:
    probe = FakeProbe(ATTENTION)
    watch = Watch(probe, 1, lambda timeout: [FFN], clock=clock)
    view = measure(watch, clock, probe)
    # Steps 1 to 4 begin after the first; the middle of the stretches of three.
    assert view.window_seconds == pytest.approx(0.03)
    assert view.measured_at == pytest.approx(0.04)
    assert view.busy == pytest.approx({"attend": 0.6, "dispatch": 0.1, "ffn": 0.2, "combine": 0.1})
    assert view.bubble == pytest.approx(0.4)
    assert view.transfers["dispatch"] == pytest.approx((3, 0.003))
    assert {span.step for span in view.timeline} == {1, 2, 3}
    assert view.missing == ""
    again = measure(watch, clock, probe)
    assert again.transfers["dispatch"] == pytest.approx((6, 0.006))
    watch.close()


def test_a_side_that_does_not_answer_is_missing_and_not_idle(clock: Clock) -> None:
    def collect(timeout: float) -> list[Measured]:
        raise EngineFailedError("process 1 (ffn) did not send 'measured' within 5 s")

    probe = FakeProbe(ATTENTION)
    watch = Watch(probe, 1, collect, clock=clock)
    view = measure(watch, clock, probe)
    assert view.busy == pytest.approx({"attend": 0.6, "combine": 0.1}, abs=0.4)
    assert set(view.busy) == {"attend", "combine"}
    assert view.bubble is None
    assert view.missing == "process 1 (ffn) did not send 'measured' within 5 s"
    watch.close()


def test_as_many_steps_as_are_sampled_leave_a_steady_window(clock: Clock) -> None:
    """The first attend waits for steps that were not measured; it is not drawn."""
    attends = lane_of_steps("attend", 6, offset=30, steps=module.STEPS)
    attends[0] = msgspec.structs.replace(attends[0], enqueued_ns=0)
    probe = FakeProbe(Measured(attends + lane_of_steps("combine", 1, offset=39, steps=4)))
    watch = Watch(probe, 1, clock=clock)
    view = measure(watch, clock, probe)
    assert view.window_seconds == pytest.approx(0.02)
    assert {span.step for span in view.timeline} == {1, 2}
    assert {span.milliseconds for span in view.timeline if span.stage == "attend"} == {6.0}
    watch.close()


def test_colocated_steps(clock: Clock) -> None:
    probe = FakeProbe(Measured(lane_of_steps("step", 9)))
    watch = Watch(probe, 1, clock=clock)
    view = measure(watch, clock, probe)
    assert view.busy == pytest.approx({"step": 0.9})
    assert view.bubble == pytest.approx(0.1)
    assert view.transfers == {}
    watch.close()


def test_too_few_steps_are_no_sample(clock: Clock) -> None:
    probe = FakeProbe(Measured(lane_of_steps("step", 9, steps=2)))
    watch = Watch(probe, 1, clock=clock)
    assert measure(watch, clock, probe).measured_at is None
    watch.close()


def test_the_timeline_has_an_end(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SPANS", 2)
    probe = FakeProbe(ATTENTION)
    watch = Watch(probe, 1, clock=clock)
    view = measure(watch, clock, probe)
    assert len(view.timeline) == 2
    assert view.timeline_cut
    watch.close()


def test_a_mistake_in_the_figures_ends_nothing(clock: Clock) -> None:
    probe = FakeProbe(Measured([]))
    watch = Watch(probe, 1, clock=clock)
    measure(watch, clock, probe)
    probe.measured = None  # no figures
    measure(watch, clock, probe)
    probe.measured = ATTENTION
    assert measure(watch, clock, probe).transfers == {"combine": Transfers(3, pytest.approx(0.003))}
    watch.close()


def test_each_domain_has_its_part():
    """Lanes 0 and 2 are domain 0's, lane 1 is domain 1's; what is cut by the window counts in
    part."""

    def span(stage, lane, step, start, end):
        return Span(stage, lane, 0, step, start * MS, end * MS, 0, start * MS)

    spans = [
        span("attend", 0, 1, -5, 5),
        span("ffn", 0, 1, 5, 10),
        span("attend", 2, 2, 10, 40),
        span("attend", 1, 1, 90, 120),
    ]
    window = summarise(spans, (0, 100 * MS))
    assert domain_shares(spans, window, 2) == [
        DomainShare(0, 2, {"attend": pytest.approx(0.35), "ffn": pytest.approx(0.05)}),
        DomainShare(1, 1, {"attend": pytest.approx(0.1)}),
    ]
