import json
from pathlib import Path

import pytest

from jaxserve.errors import ConfigError
from jaxserve.planner.hardware import load_hardware
from jaxserve.planner.measurements import (
    calibration,
    expected,
    joined,
    read_calibration,
    read_measurements,
)
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
    assert seconds == step3.attend(step3.model.attention[0], hardware, 64, 1).seconds
    # The cache may have another format: Step-3 as its paper times it.
    (other,) = read_measurements(write(tmp_path / "b.json", {**ATTEND, "cache": "bfloat16"}))
    key, _, slower = expected(other)
    assert found.key != other.key
    assert key.format == "fp8, cache bfloat16, products bfloat16"
    step3 = calculator(context=8192, cache="bfloat16")
    assert slower == step3.attend(step3.model.attention[0], hardware, 64, 1).seconds
    assert slower - seconds > 64 * 8192 * 512 / hardware.bandwidth


@pytest.mark.parametrize("op", ["enter", "attend", "dispatch", "ffn", "combine", "leave", "host"])
def test_every_stage_can_be_predicted(tmp_path, op):
    (found,) = read_measurements(write(tmp_path / "a.json", {**ATTEND, "op": op, "dp": 2, "ep": 2}))
    assert expected(found).roofline > 0 or op == "host"


def test_later_measurements_of_the_same_replace_earlier_ones(tmp_path):
    old = read_measurements(write(tmp_path / "old.json", ATTEND, {**ATTEND, "batch": 8}))
    new = read_measurements(write(tmp_path / "new.json", {**ATTEND, "seconds": 1.0}))
    assert [(one.batch, one.seconds) for one in joined([old, new])] == [(64, 1.0), (8, 150e-6)]


def test_a_calibrated_prediction_is_the_measurement(tmp_path):
    points = [ATTEND, {**ATTEND, "context": 32768, "seconds": 300e-6}]
    path = write(tmp_path / "bench.json", *points)
    found = read_calibration(path)
    hardware = load_hardware("h200")
    for point, measured in zip(read_measurements(path), (150e-6, 300e-6), strict=True):
        plain = calculator(context=point.context, dispatch="bfloat16")
        model, corrected = plain.model, plain._replace(measured=found)
        seconds = corrected.attend(model.attention[0], hardware, 64, 1).seconds
        assert seconds == pytest.approx(measured)
        other = corrected.attend(model.attention[0], load_hardware("h20"), 64, 1).seconds
        assert other == plain.attend(model.attention[0], load_hardware("h20"), 64, 1).seconds


def test_what_is_wrong_is_named(tmp_path):
    path = tmp_path / "bench.json"
    for point, message in (
        ({"seconds": 0.0}, r"\[0\].seconds = 0.0 is not above 0"),
        ({"op": "gemm"}, r"Invalid enum value 'gemm'"),
        ({"speed": 3}, "unknown field `speed`"),
        ({"batch": -1}, r"\[0\].batch = -1"),
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
    """Of its tokens, and of as many blocks of 128 positions as the sequences reach into."""
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
