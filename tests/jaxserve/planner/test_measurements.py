import json
from pathlib import Path

import pytest

from jaxserve.errors import ConfigError
from jaxserve.observe.spans import Span
from jaxserve.planner.hardware import load_hardware
from jaxserve.planner.measurements import (
    Timed,
    calibration,
    expected,
    joined,
    observe,
    read_calibration,
    read_measurements,
    read_spans,
)
from jaxserve.planner.stage_times import attend
from jaxserve.roles.layout import StepLoad
from tests.jaxserve.planner.making import calculator

STAGE = {"device_kind": "NVIDIA H200", "op": "attend", "model": "step3"}
ATTEND = STAGE | {"batch": 64, "context": 8192, "format": "fp8", "seconds": 150e-6}


def write(path: Path, *points: dict) -> Path:
    path.write_text(json.dumps(points), encoding="utf-8")
    return path


def test_the_form_that_a_bench_writes(tmp_path):
    (found,) = read_measurements(write(tmp_path / "bench.json", ATTEND))
    assert (found.op, found.batch, found.seconds) == ("attend", 64, 150e-6)
    assert (found.dp, found.tp, found.ep, found.ffn_tp) == (1, 1, 1, 1)
    key, _, seconds = expected(found)
    hardware = load_hardware("h200")
    assert key[:3] == ("attend", hardware.name, "step3")
    step3 = calculator(context=8192)
    assert seconds == attend(step3, step3.model.attention[0], hardware, 1, 64).seconds
    # The cache may have another format: Step-3 as its paper times it.
    (other,) = read_measurements(write(tmp_path / "b.json", {**ATTEND, "cache": "bfloat16"}))
    key, _, slower = expected(other)
    assert found.key != other.key
    assert key.format == "fp8, cache bfloat16, products bfloat16"
    step3 = calculator(context=8192, cache="bfloat16")
    assert slower == attend(step3, step3.model.attention[0], hardware, 1, 64).seconds
    assert slower - seconds > 64 * 8192 * 512 / hardware.bandwidth


@pytest.mark.parametrize("op", ["enter", "attend", "dispatch", "ffn", "combine", "leave", "host"])
def test_every_stage_can_be_predicted(tmp_path, op):
    (found,) = read_measurements(write(tmp_path / "a.json", {**ATTEND, "op": op, "dp": 2, "ep": 2}))
    assert expected(found).roofline > 0 or op == "host"


def test_later_measurements_of_the_same_replace_earlier_ones(tmp_path):
    old = read_measurements(write(tmp_path / "old.json", ATTEND, {**ATTEND, "batch": 8}))
    new = read_measurements(write(tmp_path / "new.json", {**ATTEND, "seconds": 1.0}))
    assert [(one.batch, one.seconds) for one in joined([old, new])] == [(64, 1.0), (8, 150e-6)]


def test_what_is_wrong_is_named(tmp_path):
    path = tmp_path / "bench.json"
    for point, message in (
        ({"seconds": 0.0}, r"Expected `float` > 0.0 - at `\$\[0\].seconds`"),
        ({"op": "gemm"}, r"Invalid enum value 'gemm'"),
        ({"speed": 3}, "unknown field `speed`"),
        ({"batch": -1}, r"Expected `int` >= 1 - at `\$\[0\].batch`"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_measurements(write(path, {**ATTEND, **point}))
    with pytest.raises(ConfigError, match="No such file"):
        read_measurements(tmp_path / "none.json")


def test_layers_of_a_kind_have_a_fit_of_their_own(tmp_path):
    """Step-3's dense layers are its first group, its MoE layers the larger second one."""
    ffn = {**ATTEND, "op": "ffn"}
    points = [ffn, {**ffn, "layers": 0, "seconds": 1.0}, {**ffn, "layers": 1, "batch": 8}]
    found = read_calibration(write(tmp_path / "a.json", *points))
    assert {key.layers: one.points for key, one in found.fits.items()} == {0: 1, 1: 2}
    wrong = read_measurements(write(tmp_path / "b.json", {**ffn, "layers": 2}))
    with pytest.raises(ConfigError, match="step3 has no layers 2 with ffn"):
        calibration(wrong)


def test_without_kernels_a_stage_takes_the_time_of_its_bucket(tmp_path):
    """Bytes of its tokens, and of the blocks of 128 positions that the sequences reach into."""
    one = {**ATTEND, "device_kind": "cpu", "format": "float32", "rows": "float32", "batch": 4}
    small, large, held = read_measurements(
        write(
            tmp_path / "a.json",
            {**one, "context": 150, "padded": 16, "reach": 256},
            {**one, "context": 200, "padded": 16, "reach": 1024},
            {**one, "context": 400, "padded": 16, "reach": 1024},
        )
    )
    assert expected(small).terms == expected(large).terms
    more = expected(held).terms.memory - expected(large).terms.memory
    assert more * load_hardware("cpu").bandwidth == pytest.approx(16 * 256 * 2 * 256 * 4)
    on_gpu = [{**one, "device_kind": "h20", "context": size, "reach": 512} for size in (100, 200)]
    first, second = read_measurements(write(tmp_path / "b.json", *on_gpu))
    assert expected(first).terms.memory < expected(second).terms.memory


SMALL, LARGE = StepLoad(16, 4, 2, 2, 100, 100), StepLoad(64, 4, 20, 20, 1000, 1000)


def stages(step, at, load, attend=10, ffn=5, lane=0):
    """Two layers and the leave, times in µs."""
    spans = []
    for layer in range(2):
        for stage, duration in (("attend", attend), ("dispatch", 1), ("ffn", ffn), ("combine", 2)):
            spans.append(span(stage, layer, step, at, at + duration, load, lane))
            at += duration
    return [*spans, span("attend", 2, step, at, at + 3, load, lane)]


def span(stage, layer, step, start, end, load, lane=0, enqueued=0):
    return Span(stage, lane, layer, step, start * 1000, end * 1000, 0, enqueued * 1000, load)


def test_means_of_steps_that_are_alike():
    """A step begins where the lane's last one ended, so the first of all has no duration."""
    spans = []
    for step, (at, load, seconds) in enumerate(
        [(0, SMALL, 99), (250, SMALL, 12), (300, SMALL, 90), (600, LARGE, 40), (700, LARGE, 40)]
    ):
        spans += stages(step, at, load, seconds)
    small, large = observe(spans, [(0, 0), (0, 1)])
    assert (small.load, large.load) == (SMALL, LARGE)
    assert small.stages[("enter", 0)] == (3, pytest.approx(51e-6))  # the first embeds, too
    assert small.stages[("attend", 0)] == (3, pytest.approx(51e-6))
    five = Timed(3, pytest.approx(5e-6))
    assert small.stages[("ffn", 0)] == small.stages[("ffn", 1)] == five
    assert small.stages[("dispatch", 0)].number == 6
    assert small.stages[("leave", 0)] == Timed(3, pytest.approx(3e-6))
    assert small.step == (2, pytest.approx((76 + 206) / 2 * 1e-6))
    assert large.step == Timed(1, pytest.approx(100e-6))


def test_what_ordinary_steps_are_made_of_adds_up():
    """Every stage is late now and then, in another step each; one step has a pause beside."""
    spans, at = [], 0
    for step in range(41):
        late = {"attend": 30 * (step % 4 == 1), "ffn": 30 * (step % 4 == 3)}
        one = stages(step, at, SMALL, 10 + late["attend"], 5 + late["ffn"])
        at = one[-1].end_ns // 1000 + (2000 if step == 20 else 0)
        spans += one
    (only,) = observe(spans, [(0, 0), (0, 0)])
    times = {stage: timed.seconds for (stage, _), timed in only.stages.items()}
    counts = {"enter": 1, "attend": 1, "dispatch": 2, "ffn": 2, "combine": 2, "leave": 1}
    assert sum(count * times[stage] for stage, count in counts.items()) == pytest.approx(
        only.step.seconds
    )
    assert 39e-6 < only.step.seconds < 100e-6


def test_a_stage_whose_end_was_noted_late_took_the_next_one_s_time():
    """The dispatch's end is noted when the ffn's is: the sum of both is right."""
    spans = []
    for step in range(4):
        one = stages(step, 50 * step, SMALL)
        if step == 1:
            one[1] = span("dispatch", 0, step, 60, 66, SMALL)
            one[2] = span("ffn", 0, step, 66, 66, SMALL)
        spans += one
    (only,) = observe(spans, [(0, 0), (0, 1)])
    assert only.stages["ffn", 0].number == 3
    layers = only.stages["ffn", 0].seconds + only.stages["ffn", 1].seconds
    assert layers + 2 * only.stages["dispatch", 0].seconds == pytest.approx(12e-6)


def test_the_host_where_lanes_wait_for_it():
    """Steps of 39 µs, enqueued 60 µs one after the other: the host takes 60, of two lanes 30 each.
    Those that were enqueued long before wait for devices alone."""
    early = [one for step in range(5) for one in stages(step, 39 * step, SMALL)]
    assert ("host", 0) not in observe(early, [(0, 0)] * 2)[0].stages

    def waiting(lanes):
        for number in range(5 * lanes):
            step, lane = divmod(number, lanes)
            others = stages(step, 60 * step, SMALL, lane=lane)
            yield span("attend", 0, step, 60 * step, 60 * step + 10, SMALL, lane, 60 * step)
            yield from others[1:]

    for lanes in (1, 2):
        (only,) = observe(list(waiting(lanes)), [(0, 0)] * 2)
        assert only.stages["host", 0].seconds == pytest.approx(60e-6 / lanes)


def test_contexts_that_are_close_are_alike():
    spans = []
    for step, context in enumerate((1000, 1001, 1002, 2000)):
        spans += stages(step, 100 * step, StepLoad(16, 4, 1, 1, context, context))
    assert [one.load.context for one in observe(spans, [(0, 0)] * 2)] == [1001, 2000]


def test_traces_that_cannot_be_judged(tmp_path):
    with pytest.raises(ConfigError, match="the trace has 2 layers, the model 3"):
        observe(stages(0, 0, SMALL), [(0, 0)] * 3)
    with pytest.raises(ConfigError, match="no stage that can be measured"):
        observe(stages(0, 0, StepLoad(16, 4, 0, 0, 0, 0)), [(0, 0)] * 2)
    with pytest.raises(ConfigError, match=r"timeline.json: No such file"):
        read_spans(tmp_path)
    (tmp_path / "timeline.json").write_text('{"spans": []}')
    with pytest.raises(ConfigError, match="no spans"):
        read_spans(tmp_path)
