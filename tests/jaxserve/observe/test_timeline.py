"""Fractions from spans: literal numbers."""

import pytest

from jaxserve.observe.merging import merge
from jaxserve.observe.spans import AFDStage, Span
from jaxserve.observe.timeline import steady_window, summarise, typical_steps
from tests.jaxserve.observe.test_merging import ATTENTION_PROCESS, FFN_PROCESS, MS


def ran(
    stage: AFDStage, start: int, end: int, *, lane: int = 0, layer: int = 0, step: int = 0
) -> Span:
    """A finished span, times in ms."""
    return Span(stage, lane, layer, step, start * MS, end * MS, 0, 0)


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
    """The first attend seems to take as long as the work under way when recording began."""
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
