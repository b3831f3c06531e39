import msgspec
import numpy as np
import pytest

from jaxserve.config.shipped import CONFIGS
from jaxserve.model.ffn.placement import SlotSizes
from jaxserve.planner import stage_times
from jaxserve.planner.assumptions import Assumptions, Formats
from jaxserve.planner.calibration import Calibration, Fit, FitKey
from jaxserve.planner.hardware import load_hardware
from jaxserve.planner.layouts import Layout
from jaxserve.planner.models import Attending, load_model
from jaxserve.planner.noise import ExpertLoads, Skew
from jaxserve.planner.stage_times import Rooflines, Rows, StepTimes
from jaxserve.planner.stages import Calculator
from tests.jaxserve.planner.making import H800, calculator, layout, searcher

LAYOUT = layout("afd", dp=16, ep=2, ffn_tp=8, lanes=3)


def decode(groups: int, batch: int, length: int) -> Rows:
    """`batch` sequences a group, each at its next token."""
    rows = groups * batch
    return Rows(
        groups,
        np.repeat(np.arange(groups), batch),
        np.ones(rows, int),
        np.full(rows, length),
        batch,
    )


def rooflines(planned: Layout = LAYOUT, made: Calculator | None = None, **kwargs) -> Rooflines:
    made = made or calculator()
    return Rooflines(planned, made, made, (H800, H800), **kwargs)


@pytest.mark.parametrize("mode", ["afd", "ep"])
def test_equal_sequences_take_what_the_search_says(mode):
    colocated = {"ep": 16, "ffn_tp": 1, "lanes": 1} if mode == "ep" else {}
    planned = msgspec.structs.replace(LAYOUT, mode=mode, **colocated)
    plan = searcher().evaluate(planned, 64)
    times = rooflines(planned).step(decode(16, 64, 4096))
    stages = {name: stage.seconds for name, stage in plan.stages.items()}
    assert times.attend[30] == pytest.approx(np.full(16, stages["attend"]))
    assert times.ffn[30] == pytest.approx(stages["ffn"])
    assert times.dispatch[30] == pytest.approx(stages["dispatch"])
    assert times.combine[30] == pytest.approx(stages["combine"])
    assert len(times.attend) == len(times.ffn) == 61


def test_longer_sequences_take_a_group_longer():
    rows = decode(2, 4, 1000)._replace(length=np.array([1000] * 4 + [9000] * 4))
    attend = rooflines(msgspec.structs.replace(LAYOUT, dp=2)).step(rows).attend[0]
    even = rooflines(msgspec.structs.replace(LAYOUT, dp=2)).step(decode(2, 4, 5000)).attend[0]
    assert attend[0] < even[0] < attend[1]
    assert attend.mean() == pytest.approx(even[0])


def test_a_prefill_chunk_attends_to_what_is_before_each_token():
    rows = Rows(1, np.zeros(1, int), np.array([512]), np.array([2048]), 512)
    made = calculator()
    found = rooflines(msgspec.structs.replace(LAYOUT, dp=1)).step(rows).attend[0][0]
    pairs = sum(range(1537, 2049))
    group = made.model.attention[0]
    seconds, _ = made.attended(group, H800, 1, Attending(512, 2048, pairs))
    assert found == pytest.approx(seconds)


class TestLatentPrompts:
    """DeepSeek-V3's 128 heads: 192 + 128 numbers a pair expanded, 576 + 512 absorbed."""

    MAPS = 128 * 512 * (128 + 128)
    LINEAR = 2 * 4096 * (MAPS + 1536 * (7168 + 128 * 192) + 7168 * (576 + 128 * 128)) / 989e12

    def attend(self, tokens: int, length: int) -> float:
        ideal = Assumptions(compute=1, memory=1, network=1, stage_seconds=0)
        made = calculator("deepseek-v3", assumed=ideal)
        times = rooflines(msgspec.structs.replace(LAYOUT, dp=1), made)
        rows = Rows(1, np.zeros(1, int), np.array([tokens]), np.array([length]), tokens)
        return float(times.step(rows).attend[0][0])

    @pytest.mark.parametrize("before", [0, 8192])
    def test_tpus_expand_within_chunks_and_others_all_of_long_ones(self, before, monkeypatch):
        pairs = 4096 * 4097 / 2
        flops = 2 * 128 * (320 * pairs + 1088 * 4096 * before) + 2 * 4096 * self.MAPS
        monkeypatch.setattr(stage_times, "least_chunk", lambda *_: 0)
        found = self.attend(4096, before + 4096)
        monkeypatch.undo()
        assert found == pytest.approx(flops / 989e12 + self.LINEAR)
        attending = 2 * 128 * 320 * (pairs + 4096 * before) / 989e12
        # A chunk's own tokens pass the maps as linear ones; what is expanded is written.
        written = (before + 4096) * 128 * 320 * 2 / 3.35e12
        expanding = max(2 * before * self.MAPS / 989e12, written)
        expanding += before * (576 + 4) / 3.35e12  # of latents
        found = self.attend(4096, before + 4096)
        assert found == pytest.approx(attending + expanding + self.LINEAR)
        flops = 2 * 128 * 1088 * (320 * 321 / 2 + 320 * before)  # fewer than 342 tokens: absorbed
        short = pytest.approx(flops / 989e12 + self.LINEAR * 320 / 4096)
        assert self.attend(320, before + 320) == short


def test_from_which_chunks_on_prompts_are_expanded_alone():
    engine, (group, *_) = calculator("deepseek-v3"), load_model("deepseek-v3").attention
    every = calculator("deepseek-v3", assumed=Assumptions(expanded=True))
    cases = ((engine, H800), (engine, load_hardware("v6e")), (every, load_hardware("v6e")))
    assert [stage_times.least_chunk(made, group, on) for made, on in cases] == [342, 0, 2]


def test_a_collective_waits_for_the_fullest_group():
    """One prompt in one of four groups: its devices send all of it."""
    four = layout("ep", dp=4)
    one = Rows(4, np.zeros(1, int), np.array([512]), np.array([512]), 512)
    all_four = Rows(4, np.arange(4), np.full(4, 512), np.full(4, 512), 512)
    alone, full = (rooflines(four).step(rows) for rows in (one, all_four))
    assert alone.combine[30] == pytest.approx(full.combine[30], rel=0.05)  # and chance
    assert alone.ffn[30] < full.ffn[30]


def test_groups_exchange_the_pages_of_a_prompt():
    """DeepSeek-V3's rows of 580 bytes: three groups' come over NVLink, all are written again."""
    ideal = Assumptions(compute=1, memory=1, network=1, collective_seconds=3e-6)
    made = rooflines(layout("ep", dp=4), calculator("deepseek-v3", assumed=ideal))
    alone = Rows(4, np.arange(4), np.full(4, 512), np.full(4, 512), 512)
    more = made.step(alone._replace(exchanged=640)).attend - made.step(alone).attend
    written = 2 * 4 * 640 * 580 / 3.35e12
    assert more == pytest.approx(np.full((61, 4), 3e-6 + 3 * 640 * 580 / 200e9 + written))


def test_skewed_experts_keep_the_busiest_device_longer():
    def ffn(skew: float) -> list[float]:
        random = np.random.default_rng(1)
        popularity = Skew("spread", skew).popularity(random, 61, 48)
        loads = ExpertLoads(random, popularity, SlotSizes(48, 16), top_k=3)
        planned = msgspec.structs.replace(LAYOUT, ep=16, ffn_tp=1)
        made = calculator(assumed=Assumptions(alltoall=True))
        return rooflines(planned, made, experts=loads).step(decode(16, 1024, 4096)).ffn

    assert np.mean(ffn(1.0)[5:]) > 1.3 * np.mean(ffn(0.0)[5:])
    assert ffn(1.0)[0] == ffn(0.0)[0]  # a dense layer has no experts


class TestAsMeasured:
    """Where stages were measured, and where there are no kernels."""

    def of(self, rows: Rows, **fits: Fit) -> StepTimes:
        cpu, demo = load_hardware("cpu"), load_model(str(CONFIGS / "demo"))
        formats = Formats(weights="float32", cache="float32", dispatch="float32", rows="float32")
        keys = {
            stage: FitKey(stage, cpu.name, "demo", formats.of(stage), 0)  # type: ignore[arg-type]
            for stage in fits
        }
        measured = Calibration({keys[stage]: one for stage, one in fits.items()})
        made = Calculator(demo, 100, formats, Assumptions(), measured)
        return Rooflines(layout("afd", "cpu"), made, made, (cpu, cpu)).step(rows)

    def test_the_first_attend_has_a_fit_of_its_own(self):
        rows = decode(1, 8, 100)
        attend, enter = (Fit(seconds, 0.0, 0.0, 1, 0.0, True) for seconds in (1.0, 5.0))
        found = [float(one[0]) for one in self.of(rows, attend=attend, enter=enter).attend]
        assert found == [5.0, 1.0, 1.0, 1.0, 1.0]
        assert [float(one[0]) for one in self.of(rows, attend=attend).attend] == [1.0] * 5

    def test_no_kernels_attend_to_whole_blocks_up_to_the_longest_sequence(self):
        attend = Fit(0.0, 1.0, 1.0, 1, 0.0, True)

        def seconds(length: int, reach: int) -> float:
            rows = decode(1, 8, length)._replace(reach=reach)
            return float(self.of(rows, attend=attend).attend[1][0])

        assert seconds(300, 1024) == seconds(384, 1024) == seconds(300, 384)
        assert seconds(300, 1024) < seconds(385, 1024) == seconds(512, 512)
        assert seconds(10, 16) < seconds(10, 64) == seconds(32, 1024)
        assert seconds(32, 1024) < seconds(33, 1024) == seconds(64, 64) < seconds(97, 1024)
        assert seconds(97, 1024) == seconds(128, 1024) < seconds(129, 1024) == seconds(256, 256)

    def test_no_kernels_sample_whole_buckets(self):
        leave, rows = Fit(0.0, 1.0, 1.0, 1, 0.0, True), decode(1, 8, 100)
        assert self.of(rows._replace(sampled=16), leave=leave).leave == pytest.approx(
            self.of(decode(1, 16, 100), leave=leave).leave
        )
