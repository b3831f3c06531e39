"""The recorder notes the end of every stage, whichever ends first, with bounded memory."""

import sys
import threading

import pytest

from jaxserve.observe.merging import merge
from jaxserve.observe.recorder import Recorder
from jaxserve.observe.spans import STAGES, Span
from jaxserve.roles.layout import StepLoad
from tests.jaxserve.waiting import Clock, until

MS = 1_000_000


class Gate:
    """A result that is ready when the test says so."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def block_until_ready(self) -> None:
        assert self.event.wait(30)


class Donated:
    def block_until_ready(self) -> None:
        raise RuntimeError("Array has been deleted.")


@pytest.fixture
def clock() -> Clock:
    """Shows nanoseconds."""
    return Clock()


@pytest.mark.parametrize(("stage", "lane"), [("ffn", 0), ("attend", 1)])
def test_a_late_stage_holds_up_no_other_stage_and_no_other_lane(clock, stage, lane):
    recorder = Recorder(process=3, clock=clock)
    late, early = Gate(), Gate()
    recorder.observe("attend", 0, 1, 7, late)
    recorder.observe(stage, lane, 1, 8, early)
    clock.now = 5 * MS
    early.event.set()
    assert until(recorder.spans) == [Span(stage, lane, 1, 8, 0, 5 * MS, 3, 0)]
    assert not recorder.flush(0.01)
    clock.now = 9 * MS
    late.event.set()
    assert recorder.flush(30)
    assert (recorder.spans()[1].step, recorder.spans()[1].end_ns) == (7, 9 * MS)
    recorder.close()


def test_what_the_step_had_to_do_and_when_enqueueing_began(clock):
    recorder = Recorder(clock=clock)
    ready, load = Gate(), StepLoad(16, 4, 3, 9, 60, 100)
    ready.event.set()
    clock.now = 5 * MS
    recorder.observe("attend", 0, 1, 7, ready, load, 2 * MS)
    (span,) = merge([recorder.ended()])
    assert span == Span("attend", 0, 1, 7, 2 * MS, 5 * MS, 0, 2 * MS, load)


def test_an_end_that_another_thread_has_seen_before(clock):
    recorder = Recorder(clock=clock)
    first, second = Gate(), Gate()
    for step, gate in enumerate((first, second)):
        recorder.observe("attend", 0, 1, step, gate)
    clock.now = 5 * MS
    recorder.seen(0, first)
    clock.now = 7 * MS  # when this recorder's thread gets a core
    first.event.set()
    second.event.set()
    assert [span.end_ns for span in recorder.ended()] == [5 * MS, 7 * MS]


def test_memory_is_bounded_and_losses_are_counted(clock):
    recorder = Recorder(capacity=4, backlog=2, clock=clock)
    gate = Gate()
    for step in range(3):
        recorder.observe("attend", 0, 0, step, gate)
    assert recorder.dropped == 1
    gate.event.set()
    assert recorder.flush(30)
    recorder.observe("attend", 0, 0, 3, Donated())
    assert recorder.flush(30)
    assert recorder.dropped == 2
    for step in range(4, 10):
        clock.now = step * MS
        recorder.observe("attend", 0, 0, step, gate)
        assert recorder.flush(30)
    assert [span.step for span in recorder.spans()] == [6, 7, 8, 9]
    recorder.close()


def test_closing_ends_the_threads_and_restores_the_switch_interval():
    before, interval = set(threading.enumerate()), sys.getswitchinterval()
    recorder = Recorder()
    ready = Gate()
    ready.event.set()
    for stage in STAGES:
        recorder.observe(stage, 0, 0, 0, ready)
    own = set(threading.enumerate()) - before
    assert len(own) == len(STAGES)
    recorder.close()
    recorder.close()
    assert not any(thread.is_alive() for thread in own)
    assert sys.getswitchinterval() == interval
    recorder.observe("ffn", 0, 0, 0, Gate())
    assert recorder.dropped == 1


def test_two_recorders_restore_the_switch_interval_in_any_order():
    before = sys.getswitchinterval()
    first, second = Recorder(), Recorder()
    first.close()
    assert sys.getswitchinterval() < before
    second.close()
    assert sys.getswitchinterval() == before
