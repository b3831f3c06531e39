import numpy as np
import pytest

from jaxserve.observe.timeline import Span
from jaxserve.planner.colocated_lanes import Colocated, Overlapped
from jaxserve.planner.search import overlapped_seconds
from jaxserve.planner.stage_times import Given, Rows, StepTimes

NO_ROWS = Rows(1, *[np.zeros(0, int)] * 3, 0)


class TestColocated:
    def test_a_step_is_the_sum(self):
        pipeline = Colocated(layers=3, lanes=2, groups=4)
        times = Given(layers=3, groups=4, attend=2, dispatch=1, ffn=3, combine=1, leave=5).step(
            NO_ROWS
        )
        for lane in pipeline.idle_lanes:
            pipeline.begin(lane, lane, 0.0, times)
        assert pipeline.idle_lanes == []
        assert [pipeline.advance(0.0), pipeline.advance(0.0)] == [(0, 26.0), (1, 52.0)]
        assert not pipeline.active

    def test_a_collective_waits_for_the_last_and_says_how_long(self):
        pipeline = Colocated(layers=1, lanes=1, groups=3)
        times = StepTimes([np.array([1.0, 2.0, 6.0])], [0.5], [1.0], [0.25], 0.0)
        pipeline.begin(0, 0, 0.0, times)
        assert pipeline.advance(0.0) == (0, 7.75)
        assert pipeline.seen("dispatch") == (pytest.approx(3.5), 0.5, 5.5)
        assert pipeline.seen("combine") == (0.25, 0.25, 0.25)


def overlapped(times: StepTimes, layers: int, groups: int = 2) -> tuple[list[float], list[Span]]:
    """Ends of the first lane's steps, with both lanes always in a step, and all spans."""
    spans: list[Span] = []
    pipeline = Overlapped(layers=layers, groups=groups, note=spans.append)
    ends = []
    for number in range(8):
        for lane in pipeline.idle_lanes:
            pipeline.begin(lane, number, 0.0, times)
        lane, end = pipeline.advance(0.0)
        ends += [end] if lane == 0 else []
    return ends, spans


class TestOverlapped:
    @pytest.mark.parametrize("stages", [(5, 1, 4, 2), (5, 3, 4, 6), (9, 1, 0, 0), (4, 0, 3, 0)])
    def test_a_cycle_is_what_the_search_charges(self, stages):
        attend, dispatch, ffn, combine = stages
        given = Given(
            layers=10, groups=2, attend=attend, dispatch=dispatch, ffn=ffn, combine=combine, leave=7
        )
        ends, _ = overlapped(given.step(NO_ROWS), 10)
        assert np.diff(ends)[1:] == pytest.approx(10 * overlapped_seconds(stages) + 2 * 7)

    def test_a_lane_that_is_alone_is_the_sum(self):
        times = Given(layers=3, groups=2, attend=2, dispatch=1, ffn=3, combine=1, leave=5)
        pipeline = Overlapped(layers=3, groups=2)
        assert pipeline.idle_lanes == [0, 1]
        pipeline.begin(1, 0, 4.0, times.step(NO_ROWS))
        assert pipeline.idle_lanes == [0]
        assert pipeline.active
        assert pipeline.advance(4.0) == (1, 4 + 3 * 7 + 5)
        assert not pipeline.active

    def test_nothing_moves_while_a_batch_is_in_the_ffn(self):
        times = Given(layers=4, groups=1, attend=5, dispatch=3, ffn=4, combine=6)
        _, spans = overlapped(times.step(NO_ROWS), 4, groups=1)
        working = [(span.start_ns, span.end_ns) for span in spans if span.stage == "ffn"]
        moving = [
            (span.start_ns, span.end_ns) for span in spans if span.stage in ("dispatch", "combine")
        ]
        assert len(working) >= 3 * 4
        for begin, end in working:
            assert all(last <= begin or first >= end for first, last in moving)

    def test_the_group_that_attends_longest_sets_the_pace(self):
        """5 s against 2 s of messages: every layer and lane takes 5 + 1."""
        times = StepTimes([np.array([1.0, 5.0])] * 3, [1.0] * 3, [1.0] * 3, [1.0] * 3, 0.0)
        ends, _ = overlapped(times, 3)
        assert np.diff(ends)[1:] == pytest.approx(2 * 3 * 6)
