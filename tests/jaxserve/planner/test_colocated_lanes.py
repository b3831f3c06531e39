import numpy as np
import pytest

from jaxserve.observe.spans import STAGES, Span
from jaxserve.planner.colocated_lanes import Colocated, Overlapped
from jaxserve.planner.noise import Jitter
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

    def test_devices_are_disturbed_stage_by_stage(self):
        """Three steps against the same stages one after the other, with the same random numbers."""
        layers, groups = 3, 4
        jitter = Jitter(spread={"attend": 0.3, "dispatch": 0.5, "combine": 0.2})
        times = StepTimes(
            [np.arange(1.0, 5.0) * (layer + 1) for layer in range(layers)],
            [0.5, 0.7, 0.9],
            [1.0, 3.0, 2.0],
            [0.25, 0.5, 0.75],
            0.125,
        )
        spans: list[Span] = []
        drawn = np.random.default_rng(7)
        pipeline = Colocated(
            layers=layers,
            lanes=1,
            groups=groups,
            disturb=lambda stage, seconds: jitter.draw(drawn, stage, seconds),
            note=spans.append,
        )
        random, free, busy = np.random.default_rng(7), np.zeros(groups), np.zeros(2)
        waits, expected = [], []
        for number, now in enumerate((0.0, 1.0, 100.0)):
            pipeline.begin(0, number, now, times)
            at = np.maximum(free, now)
            for layer in range(layers):
                for stage in STAGES:
                    alike = np.broadcast_to(getattr(times, stage)[layer], groups)
                    end = at + jitter.draw(random, stage, alike)
                    if stage in ("attend", "ffn"):
                        busy[int(stage == "ffn")] += (end - at).mean()
                    else:
                        end = np.full(groups, end.max())
                    if stage == "dispatch":
                        waits.append(end - at)
                    expected.append((stage, layer, number, at.min(), end.max()))
                    at = end
            expected.append(("attend", layers, number, at.min(), at.max() + 0.125))
            free = at + 0.125
            busy[0] += 0.125
            assert pipeline.advance(now) == (0, pytest.approx(free.max(), rel=1e-12))
        assert [(s.stage, s.layer, s.step) for s in spans] == [e[:3] for e in expected]
        got = [(s.start_ns * 1e-9, s.end_ns * 1e-9) for s in spans]
        assert got == [pytest.approx(e[3:], abs=2e-9) for e in expected]
        least, most = np.min(waits), np.max(waits)
        assert pipeline.seen("dispatch") == pytest.approx((np.mean(waits), least, most))
        assert pipeline.busy == pytest.approx((*busy, 3 * 2.1, 3 * 1.5))


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
        named = dict(zip(STAGES, stages, strict=True))
        given = Given(layers=10, groups=2, leave=7, **named)
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
