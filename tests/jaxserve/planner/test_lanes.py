"""The cycle formulas of the literature, and bounds that hold whatever the times are."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.observe.spans import STAGES, Span
from jaxserve.planner.lanes import Colocated, Disaggregated, OneDispatch, step_seconds
from jaxserve.planner.noise import Jitter
from jaxserve.planner.stage_times import StepTimes
from tests.jaxserve.planner.making import Given


def run(
    lanes: int,
    stages: tuple[float, float, float, float],
    *,
    layers: int = 10,
    steps: int = 12,
    domains: int = 1,
    leave: float = 0.0,
) -> tuple[dict[int, list[float]], list[Span]]:
    """Ends of every lane's steps, and all spans, with the same times everywhere."""
    named = dict(zip(STAGES, stages, strict=True))
    times = Given(layers=layers, groups=2, leave=leave, **named).step()
    spans: list[Span] = []
    pipeline = Disaggregated(
        layers=layers, lanes=lanes, groups=2, domains=domains, note=spans.append
    )
    ends: dict[int, list[float]] = {lane: [] for lane in range(lanes * domains)}
    for number in range(steps * lanes * domains):
        for lane in pipeline.idle_lanes:
            pipeline.begin(lane, number, 0.0, times)
        lane, end = pipeline.advance(0.0)
        ends[lane].append(end)
    return ends, spans


def cycle(ends: dict[int, list[float]], layers: int = 10) -> float:
    """Seconds a layer and lane, once the pipeline is full."""
    return (ends[0][-1] - ends[0][-2]) / layers / len(ends)


class TestCycles:
    """A link for each direction: max(t_a, t_a2f, t_f, t_f2a), once there are lanes enough."""

    @pytest.mark.parametrize(
        ("stages", "expected"),
        [((4, 1, 4, 2), 4), ((4, 3, 4, 2), 13 / 3), ((6, 1, 4, 2), 6), ((2, 1, 7, 2), 7)],
    )
    def test_three_lanes(self, stages, expected):
        assert cycle(run(3, stages)[0]) == pytest.approx(expected)

    def test_a_step_is_the_fill_and_a_cycle_for_every_other_layer_and_lane(self):
        """MegaScale: (T_a + T_e + 2 T_c) + T_f (m L − 1), for m ≥ 2 (1 + T_c / T_f)."""
        lanes, layers = 4, 10
        _, spans = run(lanes, (4, 1.5, 4, 1.5), layers=layers, steps=1)
        first_steps = [span for span in spans if span.step == 0]
        last = max(span.end_ns for span in first_steps if span.stage == "combine")
        assert last / 1e9 == pytest.approx((4 + 4 + 3) + 4 * (lanes * layers - 1))

    @settings(max_examples=30)
    @given(stages=st.tuples(*[st.floats(0.1, 10)] * 4), lanes=st.integers(1, 4))
    def test_no_schedule_beats_its_busiest_resource_nor_its_own_stages(self, stages, lanes):
        ends, _ = run(lanes, stages, steps=8, layers=5)
        found = max(lane[-1] for lane in ends.values()) / (8 * 5 * lanes)
        assert found >= max(*stages, sum(stages) / lanes) * (1 - 1e-9)
        assert found <= sum(stages) * (1 + 1e-9)


class TestDomains:
    @pytest.mark.parametrize(
        ("stages", "each"), [((0.7, 0.1, 0.3, 0.1), 0.3), ((0.7, 0.4, 0.1, 0.1), 0.4)]
    )
    def test_too_many_domains_wait_for_the_experts_or_for_their_way_in(self, stages, each):
        ends, _ = run(2, stages, domains=3)
        assert (ends[0][-1] - ends[0][-2]) == pytest.approx(10 * 6 * each)


def test_a_late_device_holds_the_others_up_at_the_experts():
    times = StepTimes(np.array([[1.0, 5.0]] * 3), np.zeros(3), np.ones(3), np.zeros(3), 0.0)
    pipeline = Disaggregated(layers=3, lanes=1, groups=2)
    pipeline.begin(0, 0, 0.0, times)
    assert pipeline.advance(0.0) == (0, pytest.approx(18.0))
    assert pipeline.busy.attention == pytest.approx(9.0)  # of the mean device
    assert pipeline.busy.ffn == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("lanes", "seconds"),
    [(1, 10 * (4 + 1 + 5 + 2)), (2, 21 * 2 + 4 + 19 * 5 + 5), (3, 2 * 4 + 28 * 5.75 + 2 * 5.75)],
)
def test_whole_steps_take_turns(lanes, seconds):
    """Both roles end a turn together. Two lanes: an exchange of 2 follows the longer of a layer's
    attention and the FFN of the turn before. Three: the FFN is two turns late, and waits for a
    quarter of 3 in exchanges. All lanes' heads end the dispatch, before the next one begins."""
    times = Given(layers=10, groups=2, leave=1.0, attend=4, dispatch=1, ffn=5, combine=2).step()
    pipeline = OneDispatch(layers=10, lanes=lanes, groups=2)
    for number in (1, 2):
        for lane in pipeline.idle_lanes:
            pipeline.begin(lane, number, 0.0, times)
        end = pytest.approx(number * (seconds + lanes))
        assert [pipeline.advance(0.0) for _ in range(lanes)] == [
            (lane, end) for lane in range(lanes)
        ]
    assert step_seconds(times, lanes, 2, kind=OneDispatch) == pytest.approx(seconds + lanes)
    assert pipeline.busy.ffn == pytest.approx(2 * lanes * 10 * 5)


class TestColocated:
    def test_devices_are_disturbed_stage_by_stage(self):
        """Three steps against the same stages one after the other, with the same random numbers."""
        layers, groups = 3, 4
        jitter = Jitter(spread={"attend": 0.3, "dispatch": 0.5, "combine": 0.2})
        times = StepTimes(
            np.outer(np.arange(1.0, 4.0), np.arange(1.0, 5.0)),
            np.array([0.5, 0.7, 0.9]),
            np.array([1.0, 3.0, 2.0]),
            np.array([0.25, 0.5, 0.75]),
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
        expected = []
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
                    expected.append((stage, layer, number, at.min(), end.max()))
                    at = end
            expected.append(("attend", layers, number, at.min(), at.max() + 0.125))
            free = at + 0.125
            busy[0] += 0.125
            assert pipeline.advance(now) == (0, pytest.approx(free.max(), rel=1e-12))
        assert [(s.stage, s.layer, s.step) for s in spans] == [e[:3] for e in expected]
        got = [(s.start_ns * 1e-9, s.end_ns * 1e-9) for s in spans]
        assert got == [pytest.approx(e[3:], abs=2e-9) for e in expected]
        assert pipeline.busy == pytest.approx((*busy, 3 * 2.1, 3 * 1.5))
