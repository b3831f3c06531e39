"""When the pipeline is measured, and what becomes of it: a probe and a clock that do as told."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from jaxserve.errors import EngineFailedError
from jaxserve.observe import watch as module
from jaxserve.observe.spans import Span
from jaxserve.observe.view import FFNWorkerView, PipelineView, Transfers
from jaxserve.observe.watch import Watch
from tests.jaxserve.waiting import Clock, until

MS = 1_000_000


class FakeProbe:
    """Sees the spans it is given; remembers when it was turned on and off."""

    def __init__(self, measured: list[Span]):
        self.measured = measured
        self.turned: list[bool] = []
        self.taken = threading.Semaphore(0)

    def turn(self, on: bool) -> None:
        self.turned.append(on)

    def take(self, timeout: float) -> list[Span]:
        self.taken.release()
        return self.measured

    def close(self) -> None: ...


def lane_of_steps(stage, milliseconds, *, offset=0, process=0, steps=5):
    """Steps of 10 ms, one after the other; the stage takes these milliseconds of each."""
    return [
        Span(
            *(stage, 0, 0, step, 0, (10 * step + offset + milliseconds) * MS, process),
            (10 * step + offset) * MS,
        )
        for step in range(steps)
    ]


ATTENTION = lane_of_steps("attend", 6) + lane_of_steps("combine", 1, offset=9)
FFN = lane_of_steps("dispatch", 1, offset=6) + lane_of_steps("ffn", 2, offset=7)


class Watched:
    """A watch of a probe that sees these spans.

    Args:
      collect: gives what other processes have measured.
      passes: those of an ffn worker in another runtime.
    """

    def __init__(self, measured: list[Span], lanes: int = 1, collect=None, passes=None) -> None:
        self.clock, self.probe = Clock(100.0), FakeProbe(measured)
        self.watch = Watch(self.probe, lanes, collect, clock=self.clock, passes=passes)

    def sample(self) -> None:
        """Goes on to the end of a sample that has begun, and until its view is there."""
        while self.watch.next():
            pass
        assert self.probe.taken.acquire(timeout=10)
        until(lambda: not self.watch._processing)

    def measure(self) -> PipelineView:
        """Takes one sample; returns its view."""
        self.watch.look()
        assert self.watch.next()
        self.sample()
        self.clock.now += 1000
        return self.watch.look()


@pytest.fixture
def watched() -> Iterator[Callable[..., Watched]]:
    made: list[Watched] = []

    def make(*given: Any) -> Watched:
        made.append(Watched(*given))
        return made[-1]

    yield make
    for one in made:
        one.watch.close()


def test_nothing_is_measured_unless_somebody_looks(watched) -> None:
    one = watched(ATTENTION)
    for _ in range(100):
        one.clock.now += 10
        assert not one.watch.next()
    assert one.probe.turned == []
    assert one.watch.look() == PipelineView()
    one.clock.now += module.LOOK_SECONDS + 1
    assert not one.watch.next()  # the look was too long ago


def test_some_steps_of_each_lane_and_then_a_rest(watched) -> None:
    one = watched(ATTENTION, 3)
    one.watch.look()
    assert [one.watch.next() for _ in range(3 * module.STEPS)] == [True] * 3 * module.STEPS
    one.clock.now += 2.0  # the sample took this long
    one.sample()
    assert one.probe.turned == [True, False]
    one.watch.look()
    one.clock.now += 2 * module.REST_FACTOR - 1
    assert not one.watch.next()
    one.clock.now += 2
    assert one.watch.next()


def test_looking_again_and_again_shortens_the_rest(watched) -> None:
    one = watched(ATTENTION)
    one.watch.look()
    assert one.watch.next()
    one.clock.now += 2.0
    one.sample()
    one.clock.now += 2 * module.CLOSE_FACTOR - 1
    one.watch.look()
    assert not one.watch.next()
    one.clock.now += 1
    assert one.watch.next()


def test_an_idle_engine_ends_it(watched) -> None:
    one = watched(ATTENTION, 3)
    one.watch.idle()
    assert one.probe.turned == []
    one.watch.look()
    assert one.watch.next()
    one.watch.idle()
    assert one.probe.turned == [True, False]
    assert one.probe.taken.acquire(timeout=10)


def test_the_figures_of_both_sides(watched) -> None:
    one = watched(ATTENTION, 1, lambda timeout: [FFN])
    view = one.measure()
    # Steps 1 to 4 begin after the first; the middle of the stretches of three.
    assert view.window_seconds == pytest.approx(0.03)
    assert view.measured_at == pytest.approx(0.04)
    assert view.busy == pytest.approx({"attend": 0.6, "dispatch": 0.1, "ffn": 0.2, "combine": 0.1})
    assert view.bubble == pytest.approx(0.4)
    assert view.transfers["dispatch"] == pytest.approx((3, 0.003))
    assert {span.step for span in view.timeline} == {1, 2, 3}
    assert view.missing == ""
    assert one.measure().transfers["dispatch"] == pytest.approx((6, 0.006))


def test_an_ffn_worker_of_another_runtime_numbers_its_passes_alone(watched) -> None:
    worker = FFNWorkerView(name="a:1", passes=5, rows=40)
    passes = [msgspec.structs.replace(span, lane=0, step=90 + span.step) for span in FFN[5:]]
    others = [msgspec.structs.replace(span, layer=1) for span in passes]
    view = watched(ATTENTION, 1, None, lambda timeout: (worker, passes + others)).measure()
    assert view.ffn == [worker]
    assert view.busy == pytest.approx({"attend": 0.6, "ffn": 0.2, "combine": 0.1})
    lanes = {(span.lane, span.step) for span in view.timeline if span.stage == "ffn"}
    assert lanes == {(0, 1), (0, 2), (0, 3), (-1, 91), (-1, 92), (-1, 93)}


def test_a_side_that_does_not_answer_is_missing_and_not_idle(watched) -> None:
    def collect(timeout: float) -> list[list[Span]]:
        raise EngineFailedError("process 1 (ffn) did not send 'measured' within 5 s")

    view = watched(ATTENTION, 1, collect).measure()
    assert view.busy == pytest.approx({"attend": 0.6, "combine": 0.1}, abs=0.4)
    assert set(view.busy) == {"attend", "combine"}
    assert view.bubble is None
    assert view.missing == "process 1 (ffn) did not send 'measured' within 5 s"


def test_as_many_steps_as_are_sampled_leave_a_steady_window(watched) -> None:
    """The first attend waits for steps that were not measured; it is not drawn."""
    attends = lane_of_steps("attend", 6, offset=30, steps=module.STEPS)
    attends[0] = msgspec.structs.replace(attends[0], enqueued_ns=0)
    view = watched(attends + lane_of_steps("combine", 1, offset=39, steps=4)).measure()
    assert view.window_seconds == pytest.approx(0.02)
    assert {span.step for span in view.timeline} == {1, 2}
    assert {span.milliseconds for span in view.timeline if span.stage == "attend"} == {6.0}


def test_colocated_steps(watched) -> None:
    view = watched(lane_of_steps("step", 9)).measure()
    assert view.busy == pytest.approx({"step": 0.9})
    assert view.bubble == pytest.approx(0.1)
    assert view.transfers == {}


def test_too_few_steps_are_no_sample(watched) -> None:
    assert watched(lane_of_steps("step", 9, steps=2)).measure().measured_at is None


def test_the_timeline_has_an_end(watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SPANS", 2)
    view = watched(ATTENTION).measure()
    assert len(view.timeline) == 2
    assert view.timeline_cut


def test_a_mistake_in_the_figures_ends_nothing(watched) -> None:
    one = watched([])
    one.measure()
    one.probe.measured = None  # no figures
    one.measure()
    one.probe.measured = ATTENTION
    assert one.measure().transfers == {"combine": Transfers(3, pytest.approx(0.003))}
