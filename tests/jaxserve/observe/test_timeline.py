"""Spans from completions, fractions from spans: literal numbers, and invariants of any spans."""

import sys
import threading
from itertools import pairwise

import jax
import jax.numpy as jnp
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.observe.timeline import (
    STAGES,
    AFDStage,
    Recorder,
    Span,
    merge,
    steady_window,
    summarise,
    typical_steps,
)
from jaxserve.roles.layout import StepLoad

MS = 1_000_000


def ended(
    stage: AFDStage, end: int, *, lane: int = 0, layer: int = 0, step: int = 0, enqueued: int = 0
) -> Span:
    """A span as a process records it: it knows the end (in ms) and when it was enqueued."""
    return Span(stage, lane, layer, step, enqueued * MS, end * MS, 0, enqueued * MS)


def ran(
    stage: AFDStage, start: int, end: int, *, lane: int = 0, layer: int = 0, step: int = 0
) -> Span:
    """A finished span, times in ms."""
    return Span(stage, lane, layer, step, start * MS, end * MS, 0, 0)


def rows(spans: list[Span]) -> list[tuple[str, int, int, int, int]]:
    return [(s.stage, s.lane, s.layer, s.start_ns // MS, s.end_ns // MS) for s in spans]


# A lane's first two layers: attend 4 ms, dispatch 1, ffn 3, combine 1; a second lane in its gaps.
ATTENTION_PROCESS = [
    ended("attend", 4),
    ended("attend", 8, lane=1),
    ended("combine", 9),
    ended("combine", 13, lane=1),
    ended("attend", 13, layer=1),
    ended("attend", 17, lane=1, layer=1),
]
FFN_PROCESS = [
    ended("dispatch", 5),
    ended("ffn", 8),
    ended("dispatch", 9, lane=1),
    ended("ffn", 12, lane=1),
]


def test_a_span_starts_when_its_input_and_its_submesh_are_there() -> None:
    assert rows(merge([ATTENTION_PROCESS, FFN_PROCESS])) == [
        ("attend", 0, 0, 0, 4),
        ("dispatch", 0, 0, 4, 5),
        ("attend", 1, 0, 4, 8),
        ("ffn", 0, 0, 5, 8),
        ("combine", 0, 0, 8, 9),
        ("dispatch", 1, 0, 8, 9),
        ("ffn", 1, 0, 9, 12),
        ("attend", 0, 1, 9, 13),
        ("combine", 1, 0, 12, 13),
        ("attend", 1, 1, 13, 17),
    ]


def test_merging_merged_spans_changes_nothing() -> None:
    merged = merge([ATTENTION_PROCESS, FFN_PROCESS])
    assert merge([merged]) == merged


def test_a_span_does_not_start_before_it_was_enqueued() -> None:
    spans = merge([[ended("attend", 4), ended("attend", 12, step=1, enqueued=10)]])
    assert rows(spans) == [("attend", 0, 0, 0, 4), ("attend", 0, 0, 10, 12)]


def test_a_clock_that_runs_behind_gives_an_empty_span_and_not_a_negative_one() -> None:
    spans = merge([[ended("attend", 10)], [ended("dispatch", 9)]])
    assert rows(spans) == [("attend", 0, 0, 0, 10), ("dispatch", 0, 0, 9, 9)]


def test_the_fractions_of_a_window() -> None:
    summary = summarise(merge([ATTENTION_PROCESS, FFN_PROCESS]), (0, 16 * MS))
    assert summary.attention_busy == 15 / 16  # all but 8..9
    assert summary.ffn_busy == 6 / 16
    assert summary.bubble == 1 / 16
    assert (summary.lanes, summary.steps, summary.milliseconds) == (2, 2, 16.0)
    assert summary.stages["attend"].count == 3  # the fourth ends after the window
    assert summary.stages["attend"].median_ms == 4.0
    assert summary.stages["ffn"].median_ms == 3.0
    assert summary.stages["dispatch"].busy == 2 / 16


def test_overlapping_spans_are_busy_once() -> None:
    summary = summarise([ran("ffn", 0, 6), ran("ffn", 2, 4, lane=1), ran("ffn", 8, 10)])
    assert summary.ffn_busy == 0.8
    assert summary.attention_busy == 0.0
    assert summary.bubble == pytest.approx(0.2)


def test_median_and_p90() -> None:
    spans = [ran("attend", 100 * i, 100 * i + i, step=i) for i in range(1, 21)]
    times = summarise(spans).stages["attend"]
    assert (times.count, times.median_ms, times.p90_ms) == (20, 10.5, 18.0)


def test_nothing_recorded_is_an_empty_summary() -> None:
    summary = summarise([], steady_window([]))
    assert (summary.attention_busy, summary.ffn_busy, summary.bubble) == (0.0, 0.0, 1.0)
    assert (summary.steps, summary.milliseconds) == (0, 0.0)


def test_the_steady_window_leaves_the_first_step_and_a_pause_out() -> None:
    starts = [0, 500, 510, 521, 532, 900]  # a compilation first, a pause before the last
    spans = [ran("attend", at, at + 5, step=2 * i) for i, at in enumerate(starts)]
    spans += [ran("attend", at + 5, at + 9, lane=1, step=2 * i + 1) for i, at in enumerate(starts)]
    assert steady_window(spans) == (521 * MS, 532 * MS)
    assert steady_window(spans, 2) == (510 * MS, 532 * MS)


def test_a_short_recording_loses_its_first_and_last_step_all_the_same() -> None:
    """Its first attend seems to take as long as what was under way when recording began."""
    starts = [0, 100, 110, 121]
    spans = [ran("attend", at, at + 5 if i else 100, step=i) for i, at in enumerate(starts)]
    assert steady_window(spans, 3) == (100 * MS, 121 * MS)
    assert steady_window(spans[:3], 3) == (100 * MS, 110 * MS)


def test_too_few_steps_are_shown_whole() -> None:
    assert steady_window([ran("attend", 2, 5), ran("ffn", 6, 9)]) == (2 * MS, 9 * MS)


@pytest.mark.parametrize(
    ("lanes", "layers", "steps"), [(1, 8, 3), (3, 8, 3), (3, 20, 1), (2, 61, 1)]
)
def test_a_picture_has_as_many_steps_as_can_be_read(lanes: int, layers: int, steps: int) -> None:
    spans = [ran("attend", 0, 1, lane=n, layer=i) for n in range(lanes) for i in range(layers)]
    assert typical_steps(spans) == steps


spans_of_anything = st.lists(
    st.builds(
        ended,
        st.sampled_from(STAGES),
        st.integers(0, 50),
        lane=st.integers(0, 2),
        layer=st.integers(0, 3),
        step=st.integers(0, 3),
        enqueued=st.integers(0, 50),
    ),
    max_size=40,
)


@given(spans_of_anything)
def test_spans_of_one_stage_never_overlap_and_never_precede_their_cause(spans: list[Span]) -> None:
    merged = merge([spans])
    assert len(merged) == len(spans)
    for stage in STAGES:
        one = sorted((s.end_ns, s.start_ns) for s in merged if s.stage == stage)
        assert all(start <= end for end, start in one)
        assert all(start >= end for (end, _), (_, start) in pairwise(one))
    summary = summarise(merged)
    assert 0 <= summary.attention_busy <= 1
    assert 0 <= summary.ffn_busy <= 1
    assert 0 <= summary.bubble <= 1


class Gate:
    """A result that is ready when the test says so."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def block_until_ready(self) -> None:
        assert self.event.wait(30)


class Donated:
    def block_until_ready(self) -> None:
        raise RuntimeError("Array has been deleted.")


class Clock:
    def __init__(self) -> None:
        self.milliseconds = 0

    def __call__(self) -> int:
        return self.milliseconds * MS


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.mark.parametrize(("stage", "lane"), [("ffn", 0), ("attend", 1)])
def test_a_late_stage_holds_up_no_other_stage_and_no_other_lane(
    clock: Clock, stage: AFDStage, lane: int
) -> None:
    recorder = Recorder(process=3, clock=clock)
    late, early = Gate(), Gate()
    recorder.observe("attend", 0, 1, 7, late)
    recorder.observe(stage, lane, 1, 8, early)
    clock.milliseconds = 5
    early.event.set()
    for _ in range(3000):
        if recorder.spans():
            break
        threading.Event().wait(0.01)
    assert recorder.spans() == [Span(stage, lane, 1, 8, 0, 5 * MS, 3, 0)]
    assert not recorder.flush(0.01)
    clock.milliseconds = 9
    late.event.set()
    assert recorder.flush(30)
    assert (recorder.spans()[1].step, recorder.spans()[1].end_ns) == (7, 9 * MS)
    recorder.close()


def test_what_the_step_had_to_do_and_when_enqueueing_began(clock: Clock) -> None:
    recorder = Recorder(clock=clock)
    ready, load = Gate(), StepLoad(16, 4, 3, 9, 60, 100)
    ready.event.set()
    clock.milliseconds = 5
    recorder.observe("attend", 0, 1, 7, ready, load, 2 * MS)
    (span,) = merge([recorder.ended()])
    assert span == Span("attend", 0, 1, 7, 2 * MS, 5 * MS, 0, 2 * MS, load)


def test_an_end_that_another_thread_has_seen_before(clock: Clock) -> None:
    recorder = Recorder(clock=clock)
    first, second = Gate(), Gate()
    for step, gate in enumerate((first, second)):
        recorder.observe("attend", 0, 1, step, gate)
    clock.milliseconds = 5
    recorder.seen(0, first)
    clock.milliseconds = 7  # when this recorder's thread gets a core
    first.event.set()
    second.event.set()
    assert [span.end_ns for span in recorder.ended()] == [5 * MS, 7 * MS]


def test_memory_is_bounded_and_losses_are_counted(clock: Clock) -> None:
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
        clock.milliseconds = step
        recorder.observe("attend", 0, 0, step, gate)
        assert recorder.flush(30)
    assert [span.step for span in recorder.spans()] == [6, 7, 8, 9]
    recorder.close()


def test_closing_ends_the_threads_and_restores_the_switch_interval() -> None:
    before = threading.active_count(), sys.getswitchinterval()
    recorder = Recorder()
    ready = Gate()
    ready.event.set()
    for stage in STAGES:
        recorder.observe(stage, 0, 0, 0, ready)
    assert threading.active_count() == before[0] + len(STAGES)
    recorder.close()
    recorder.close()
    assert (threading.active_count(), sys.getswitchinterval()) == before
    recorder.observe("ffn", 0, 0, 0, Gate())
    assert recorder.dropped == 1


def test_it_measures_arrays_that_are_still_being_computed() -> None:
    matrix = jnp.full((256, 256), 1e-3)
    recorder = Recorder()
    product = matrix
    for layer in range(5):
        product = jax.jit(jnp.matmul)(product, matrix)
        recorder.observe("attend", 0, layer, 0, product)
    assert recorder.flush(60)
    recorder.close()
    spans = recorder.spans()
    assert [span.layer for span in spans] == [0, 1, 2, 3, 4]
    assert all(span.enqueued_ns <= span.start_ns <= span.end_ns for span in spans)


def test_a_follower_can_send_its_spans() -> None:
    wire = msgspec.msgpack.encode(FFN_PROCESS)
    assert msgspec.msgpack.decode(wire, type=list[Span]) == FFN_PROCESS


def test_two_recorders_restore_the_switch_interval_in_any_order() -> None:
    before = sys.getswitchinterval()
    first, second = Recorder(), Recorder()
    first.close()
    assert sys.getswitchinterval() < before
    second.close()
    assert sys.getswitchinterval() == before
