import msgspec
import numpy as np
import pytest

from jaxserve.config.deployment import Deployment
from jaxserve.engine.request import Request, SamplingParams
from jaxserve.errors import ConfigError
from jaxserve.observe import timeline_view
from jaxserve.observe.timeline import steady_window, summarise
from jaxserve.planner.assumptions import Assumptions
from jaxserve.planner.demand import Demand, Lengths
from jaxserve.planner.measurements import read_spans
from jaxserve.planner.noise import Jitter
from jaxserve.planner.results import Result
from jaxserve.planner.search import Pace
from jaxserve.planner.simulate import NEVER, Conditions, SimulatedEngine, Simulation
from jaxserve.planner.stage_times import Rooflines, Rows, StepTimes
from tests.jaxserve.planner import making
from tests.jaxserve.planner.making import H800, Given, layout, searcher

LENGTHS = Lengths(prompt=100, output=60, longest=256)


def deployment(
    dp: int = 4, lanes: int = 3, slots: int = 2, mode: str = "afd", pages: int = 200
) -> Deployment:
    roles = {"attention": {"dp": dp}, "ffn": {"ep": 4}}
    return making.deployment(lanes, slots, 256, 16, 64, pages, mode=mode, **roles)


def given(groups: int = 4, leave: float = 0.0, **stages: float) -> Given:
    times = {"attend": 4e-3, "dispatch": 1e-3, "ffn": 4e-3, "combine": 1e-3} | stages
    return Given(layers=10, groups=groups, leave=leave, **times)


def simulate(
    made: Deployment | None = None, times: Given | None = None, **asked: object
) -> tuple[Result, Simulation]:
    conditions = Conditions(**{"steps": 20, "warm_up": 5, **asked})  # type: ignore[arg-type]
    simulation = Simulation(made or deployment(), times or given(), LENGTHS, conditions)
    return simulation.run()[0], simulation


class TestClosed:
    def test_the_deterministic_case_is_the_cycle_formula(self):
        result, _ = simulate()
        # Three lanes of ten layers at a cycle of 4 ms, and a token of each of 4 x 2 sequences.
        assert result.tpot.p50 == pytest.approx(3 * 10 * 4e-3)
        assert result.tpot.p99 == pytest.approx(result.tpot.p50)
        assert result.sequences == pytest.approx(4 * 2 * 3, rel=0.05)
        assert result.tokens_per_second == pytest.approx(24 / 0.12, rel=0.03)
        assert result.tokens_per_device == pytest.approx(result.tokens_per_second / 8)
        assert result.attention_busy == pytest.approx(1.0, rel=0.05)
        assert result.ffn_busy == pytest.approx(1.0, rel=0.05)
        assert result.bubble == pytest.approx(0.0, abs=0.05)
        assert result.dispatch_busy == pytest.approx(0.25, rel=0.05)

    def test_accepted_drafts_and_one_lane(self):
        one, two = simulate()[0], simulate(tokens_a_step=1.9)[0]
        assert two.tpot.p50 == pytest.approx(one.tpot.p50 / 1.9)
        assert two.tokens_per_second == pytest.approx(one.tokens_per_second * 1.9)
        alone, _ = simulate(deployment(lanes=1))
        assert alone.tpot.p50 == pytest.approx(10 * 10e-3)
        assert alone.attention_busy == pytest.approx(0.4, rel=0.1)

    def test_who_ends_is_followed_by_another(self):
        result, simulation = simulate(steps=60)
        for scheduler in simulation.schedulers:
            scheduler.check_integrity()
        assert result.finished > 10
        assert result.sequences == pytest.approx(24, rel=0.1)
        assert result.context == pytest.approx(130, rel=0.1)

    def test_jitter_costs_and_is_the_same_every_time(self):
        jitter = Jitter(spread={"attend": 0.2, "ffn": 0.2})
        first, second = simulate(jitter=jitter)[0], simulate(jitter=jitter)[0]
        assert first == second
        assert 0.12 < first.tpot.mean < 0.24
        assert simulate(jitter=jitter, seed=1)[0] != first

    @pytest.mark.parametrize("asked", [{"host_seconds": 0.1}, {"times": given(host=0.1)}])
    def test_a_slow_host_sets_the_pace(self, asked):
        assert simulate(**asked)[0].tpot.p50 == pytest.approx(3 * 0.1, rel=0.05)

    def test_whole_steps(self):
        """Two turns fill the pipeline of every step; then the FFN waits for a quarter of 2 ms."""
        result, _ = simulate(msgspec.structs.replace(deployment(), pipeline="step"))
        assert result.tpot.p50 == pytest.approx((2 * 4 + 30 * 4.5) * 1e-3)
        assert msgspec.to_builtins(result)["ffn_busy"] == pytest.approx(30 * 4 / 143, rel=0.05)


def test_domains_share_the_experts():
    one, three = simulate()[0], simulate(domains=3)[0]
    assert three.tpot.p50 == pytest.approx(3 * one.tpot.p50, rel=0.01)  # 9 lanes at 4 ms of ffn
    assert three.ffn_busy == pytest.approx(1.0, rel=0.08)
    assert three.attention_busy == pytest.approx(1 / 3, rel=0.08)
    assert three.sequences == pytest.approx(3 * one.sequences, rel=0.05)


def test_colocated():
    made = deployment(mode="colocated", lanes=1)
    result, _ = simulate(made, given(leave=2e-3))
    assert result.tpot.p50 == pytest.approx(0.102)
    assert result.tokens_per_device == pytest.approx(result.tokens_per_second / 4)
    with pytest.raises(ConfigError, match="2 domains in a colocated deployment"):
        simulate(made, domains=2)


class PerToken:
    """A layer that takes a millisecond for each padded token of a DP group."""

    layers = 1

    def __init__(self) -> None:
        self.seen: list[Rows] = []

    def step(self, rows: Rows) -> StepTimes:
        self.seen.append(rows)
        zeros, attend = np.zeros(1), np.full((1, rows.groups), rows.padded * 1e-3)
        return StepTimes(attend, zeros, zeros, zeros, 0.0)


def served(
    dp: int, requests: dict[int, int], **limits: object
) -> tuple[list[list[float]], list[Rows]]:
    """Times of the tokens of requests, a tenth of a second apart, of prompt → output tokens."""
    made = deployment(dp, 1, 4, "colocated")
    told = {"max_length": 1024, "page_buckets": [64], "token_buckets": [4, 16, 64], **limits}
    scheduler, times = msgspec.structs.replace(made.scheduler, **told), PerToken()
    engine = SimulatedEngine(msgspec.structs.replace(made, scheduler=scheduler), times)
    came: dict[str, list[float]] = {}
    for number, (prompt, output) in enumerate(requests.items()):
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        name, tokens = str(number), [1] * prompt
        came[name] = []
        engine.submit(Request(request_id=name, prompt=tokens, params=params), number / 10)
    while engine.next_at < NEVER:
        for at, outputs in engine.turn():
            for one in outputs:
                came[one.request_id].append(at)
    return [*came.values()], times.seen


@pytest.mark.parametrize(("token_ms", "late"), [(0.0, 10), (20.0, 2)])
def test_chunks_keep_the_time_between_tokens(token_ms, late):
    """The engine's own policy plans a second step of 64 tokens before it knows how long the first
    one took. The prompt has a token as soon, since tokens take the same in steps of either size."""
    (decoding, prompt), _ = served(1, {4: 300, 600: 1}, token_ms=token_ms)
    gaps = np.diff(decoding)
    assert gaps.max() == pytest.approx(0.064)
    assert (gaps > 0.02).sum() == late
    assert prompt == pytest.approx([0.74], abs=0.01)


def test_groups_that_share_a_prompt_exchange_its_pages():
    """One step has a quarter in each of four groups: four pages, or five from within one on."""
    _, steps = served(4, {256: 2}, spread=True)
    assert [[*rows.tokens, rows.exchanged] for rows in steps] == [[64, 64, 64, 64, 80], [1, 0]]


def test_the_timeline_has_the_form_of_a_measured_one(tmp_path):
    simulation = Simulation(deployment(), given(), LENGTHS, Conditions(steps=12, keep_steps=4))
    _, spans = simulation.run()
    timeline_view.write(tmp_path, spans, "as simulated")
    assert read_spans(tmp_path) == spans
    assert "as simulated" in (tmp_path / "timeline.html").read_text(encoding="utf-8")
    summary = summarise(spans, steady_window(spans))
    assert summary.lanes == 3
    assert summary.stages["attend"].median_ms == pytest.approx(4.0)
    assert summary.bubble == pytest.approx(0.0, abs=0.03)
    lanes = {(span.lane, span.step) for span in spans}
    assert len(lanes) == 3 * 4
    assert len(spans) == 12 * (4 * 10 + 1)


OVERLAPPED = Assumptions(overlapped=True, whole_dense=True)


@pytest.mark.parametrize(
    ("mode", "lanes", "assumed", "apart"),
    [
        ("ep", 2, OVERLAPPED, 0.03),
        ("ep", 1, Assumptions(), 0.03),
        # The search has both directions of the link in one stage, and hides no lane's head.
        ("afd", 3, Assumptions(), 0.07),
    ],
)
def test_one_plan_three_ways(mode, lanes, assumed, apart):
    """16 DP groups of 8 unequal sequences of 4,064 tokens on the mean."""
    plan = layout(mode, dp=16, ep=16, lanes=lanes)
    search = searcher("deepseek-v3", context=4064, assumed=assumed)
    searched = search.evaluate(plan, 8).tpot
    requests = Demand(rate=1, prompt=4032, output=64, spread=0.5).requests(8192, 64)
    times = Rooflines(plan, search.calculator, search.calculator, (H800, H800))
    pace = Pace(search, plan, requests).seconds(8)
    made = deployment(16, lanes, 8, "afd" if mode == "afd" else "colocated", pages=9000)
    limits = msgspec.structs.replace(made.scheduler, max_length=8192, page_buckets=[512])
    made = msgspec.structs.replace(made, scheduler=limits)
    lengths, conditions = (
        Lengths(prompt=4032, output=64, spread=0.5, longest=8192),
        Conditions(steps=12, warm_up=4),
    )
    result = Simulation(made, times, lengths, conditions).run()[0]
    assert pace == pytest.approx(searched, rel=apart)
    assert result.tpot.mean == pytest.approx(searched, rel=apart)
