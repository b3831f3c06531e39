"""A deployment's speed from counts: arithmetic by hand, and the committed counts of Step-3."""

import msgspec
import pytest

from jaxserve.config.load import load_deployment
from jaxserve.config.shipped import CONFIGS
from jaxserve.errors import ConfigError
from jaxserve.plan import main
from jaxserve.planner import estimate, measurements
from jaxserve.planner.assumptions import measured_speed
from jaxserve.planner.counts import Counts, _shared_seconds
from jaxserve.planner.hardware import load_hardware, read_struct
from jaxserve.planner.models import model_config, model_folder
from jaxserve.roles.layout import Bucket
from tests import golden

COUNTS = read_struct(golden.FOLDER / "planner" / "counts.json", Counts, json=True)
NVLINK = 500_000 / 360e9, 1_000_000 / 360e9
"""Seconds of the bytes of a message and an answer, at 0.8 of 450 GB/s."""


def test_stages():
    """Launches of 1.7 µs, bytes at 4.3 TB/s, and what kernels take beyond them. Sorts take 11 µs
    each, of which a launch is among the program's."""
    found = estimate.stages(COUNTS)
    assert found["attend_moe"].seconds == pytest.approx(17e-6 + 1e-6 + 10e-6 + 10e-6)
    assert found["ffn_moe"].seconds == pytest.approx(34e-6 + 100e-6 + 10e-6 + 20e-6)
    counts = msgspec.structs.replace(COUNTS, sorts=2)
    assert estimate.stages(counts)["ffn_moe"].seconds == pytest.approx(164e-6 + 2 * 9.3e-6)


def test_the_figure():
    """The ffn's 164 µs set the pace of three lanes: a step of 2 layers takes 984 µs for 3,000
    tokens on 4 devices. Where a layer of attention takes 250 instead, so does each lane in turn."""
    found = estimate.figure(COUNTS)
    assert found.bounds == pytest.approx(
        {"attention": 38e-6, "ffn": 164e-6, "network": NVLINK[1] + 20e-6}
    )
    assert (found.step, found.bound) == (pytest.approx(6 * 164e-6), "ffn")
    assert found.speed == pytest.approx(3000 / 984e-6 / 4)
    slow = estimate.figure(COUNTS, {"attend_moe": 250e-6})
    assert (slow.step, slow.bound) == (pytest.approx(6 * 250e-6), "attention")
    two = msgspec.structs.replace(COUNTS, instances=2)
    assert estimate.figure(two).bounds["network"] == pytest.approx(2 * NVLINK[1] + 20e-6)


def test_pipelines():
    """A process a GPU takes 128 µs for a layer and lane, and a step's plan, 182 µs, goes to three
    others; or 290 µs by what is published. Whole steps have a collective of 10 µs a direction, for
    half of which the FFN waits, and two turns more, of attention's 38 µs."""
    exchanges = 20e-6 + sum(NVLINK)
    layer, step = estimate.paced(COUNTS)
    assert layer.host == pytest.approx((128e-6 + 182e-6 / 2, 290e-6))
    assert layer.step == pytest.approx((6 * layer.host[0], 6 * 290e-6))
    speed = measured_speed().systems
    whole = 6 * (164e-6 + exchanges / 2) + 2 * 38e-6
    assert step.step == pytest.approx((whole / speed.p90, whole / speed.p10))


@golden.table("planner/collectives.yaml")
def test_where_a_collective_goes(on, name, microseconds):
    found = estimate.collective_seconds(name, 160_000_000, 2, 8, load_hardware(on))
    assert found * 1e6 == pytest.approx(microseconds, abs=0.01)


def test_committed_counts(tmp_path):
    """They are taken for a calibration, as what they are."""
    written = tmp_path / "stages.json"
    assert main(["estimate", "--write", str(written)]) == 0
    found = measurements.read_measurements(written)
    assert {one.op for one in found} == {"attend", "ffn", "leave"}
    assert all(one.source == "estimate" for one in found)
    told = measurements.estimated(found)
    assert told == "3 of 3 stages are ESTIMATES from compiled programs, not measured"
    assert len(measurements.calibration(found).fits) == 3


def test_counts_of_deployments(capsys):
    """Step-3's in full and a line for each of the others, or one deployment alone."""
    assert main(["estimate"]) == 0
    golden.check("planner/estimate.txt", capsys.readouterr().out)
    assert main(["estimate", "--config", "step3-v6e"]) == 0
    golden.check("planner/estimate_v6e.txt", capsys.readouterr().out)


def shared_seconds(tokens, overrides=()):
    """Seconds beyond their bytes, of a deployment like the shipped one."""
    deployment = load_deployment(CONFIGS / "step3-alltoall.yaml", overrides)
    config = model_config(model_folder(deployment.model, CONFIGS))
    return _shared_seconds(config, deployment, Bucket(tokens, 64))


def test_kernels_of_the_shared_expert():
    """Half of its width for 256 rows of a device was counted, and for 384. Of all of it, with one
    instance, nothing was; other rows are refused."""
    assert shared_seconds(128) == pytest.approx(17e-6, abs=1e-6)
    assert shared_seconds(192) == pytest.approx(25e-6, abs=1e-6)
    assert shared_seconds(128, ["ffn.instances=1"]) == 0
    with pytest.raises(ConfigError, match="no counts of 'step3_half_shared fp8_block_rows 128'"):
        shared_seconds(64)


def test_what_was_measured_replaces_estimates():
    guess = estimate.measurements(COUNTS)[0]
    real = msgspec.structs.replace(guess, seconds=2e-4, source="measured")
    other = msgspec.structs.replace(guess, batch=32)
    assert measurements.joined([[real], [guess]]) == [real]
    assert measurements.joined([[guess], [real]]) == [real]
    (fit,) = measurements.calibration([guess, real, other]).fits.values()
    assert fit.points == 1
    assert measurements.estimated([real]) == ""


def test_measured_stages_take_the_place_of_counted_ones():
    """Attention's layer takes 1 ms here: 1,000 tokens in 2 ms on four devices, a lane at a time."""
    own = next(one for one in estimate.measurements(COUNTS) if one.op == "attend")
    slow = msgspec.structs.replace(own, seconds=1e-3, source="measured", dp=1)
    stage, figure = estimate.measured_lines(COUNTS, [slow])
    assert stage.endswith("measured 1000.0 on NVIDIA H200")
    told = "with measured stages 125000 tokens/s a device, 3000 sequences with a token every 6.0 ms"
    assert figure == f"{told}, bound by attention"
    assert estimate.measured_lines(COUNTS, [own]) == []
