"""Whole tiny models: what smoothing must not change, where text comes from, and how it resumes."""

import numpy as np
import pytest

from jaxserve.calibration import layers
from jaxserve.calibration.gptq import IntMatrix
from jaxserve.calibration.run import CalibrationSettings, CalibrationText, Calibrator, cut
from tests.jaxserve.calibration.float_model import FloatModel, all_layers
from tests.reference.catalogue import CATALOGUE
from tests.reference.decoder_numpy import DecoderNumpy, rms_norm
from tests.reference.step3_numpy import Step3Numpy
from tests.reference.tiny_step3 import TinyStep3, write_tiny_step3

pytestmark = pytest.mark.unoptimised


def calibrated(model, sequences, settings=None):
    reports = []
    settings = settings or CalibrationSettings(tokens=sequences.size)
    made = Calibrator(
        model.config, model.source, CalibrationText(settings, sequences), reports.append
    )
    for name, leaves in made.blocks():
        if leaves is not None:
            model.made[name] = leaves
    return made, reports


def unquantised(monkeypatch):
    """Smoothing at full strength, and no rounding."""

    def as_it_is(weight, hessian=None, target=None):
        return IntMatrix(np.array(weight), np.ones((len(weight), 1), np.float32))

    monkeypatch.setattr(layers, "gptq", as_it_is)
    monkeypatch.setattr(layers, "rounded", as_it_is)
    monkeypatch.setattr(layers, "STRENGTHS", (0.5,))


def tokens(model, sequences, length, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(2, model.config.vocab, (sequences, length)).astype(np.int32)


@pytest.mark.parametrize(
    "name", ["deepseek_v3", "deepseek_v3_full_query_biases", "qwen3_moe_biases", "qwen3_window"]
)
def test_a_smoothed_model_is_the_same_function(name, tmp_path, monkeypatch):
    """All families, against their NumPy models."""
    unquantised(monkeypatch)
    folder = CATALOGUE[name].write(tmp_path)
    model, reference = FloatModel(folder), DecoderNumpy.from_folder(folder)
    ids = tokens(model, 1, 24)
    made, _ = calibrated(model, ids)
    assert list(model.made) == all_layers(model.config)
    norm = reference.tensors["model.norm.weight"]
    epsilon = reference.config["rms_norm_eps"]
    found = rms_norm(made.rows_before(model.config.layers, ids)[0], norm, epsilon)
    np.testing.assert_allclose(found, reference.hidden(ids[0].tolist()), rtol=2e-3, atol=2e-3)
    changed = model.made["layers.1.attention"]["input_norm"]
    assert np.abs(np.log2(changed / model.floats("layers.1.attention")["input_norm"])).max() >= 1


def test_a_smoothed_step3_and_its_module(tmp_path, monkeypatch):
    unquantised(monkeypatch)
    folder = write_tiny_step3(tmp_path, TinyStep3(mtp=True))
    model, reference = FloatModel(folder, modules=1), Step3Numpy.from_folder(folder)
    ids = tokens(model, 2, 16)
    made, reports = calibrated(model, ids)
    rows = made.rows_before(model.config.all_layers, ids)
    norm = reference.tensors["model.layers.4.shared_head.norm.weight"]
    found = rms_norm(rows[1], norm, 1e-5) @ reference.tensors["lm_head.weight"].T
    np.testing.assert_allclose(found, reference.mtp_logits(ids[1].tolist()), rtol=2e-3, atol=5e-3)
    assert [(report.layer, report.tokens) for report in reports] == [
        *((layer, 32) for layer in range(4)),
        (4, 30),
    ]
    assert list(reports[1].strengths) == [
        "input_norm",
        "attention.inter_norm",
        "attention.down",
        "post_norm",
    ]


@pytest.fixture(scope="module")
def step3(tmp_path_factory):
    return write_tiny_step3(tmp_path_factory.mktemp("step3"))


def test_goes_on_until_every_expert_saw_enough(step3):
    """With 8 tokens to begin with some expert of 8 has fewer than 4; the text is doubled until none
    has, and the rest of the text is not taken."""
    model = FloatModel(step3)
    _, reports = calibrated(model, tokens(model, 64, 8), CalibrationSettings(tokens=8))
    assert [report.fewest is None for report in reports] == [True, False, False, True]
    assert reports[0].tokens == 8
    assert 8 < reports[1].tokens <= reports[2].tokens < 512
    assert min(report.fewest for report in reports[1:3]) >= 4
    assert all(report.rounded == {} for report in reports)


def test_experts_without_enough_text_are_named_and_rounded(step3):
    model = FloatModel(step3)
    _, reports = calibrated(
        model, tokens(model, 2, 8), CalibrationSettings(tokens=8, expert_samples=7)
    )
    report = reports[1]
    assert report.tokens == 16
    assert report.rounded
    assert report.fewest == min(report.rounded.values()) < 7
    nearest = FloatModel(step3)
    expert = next(iter(report.rounded))
    smoothed = model.made["layers.1.attention"]["post_norm"]
    scales = nearest.floats("layers.1.attention")["post_norm"] / smoothed
    gate = nearest.floats("layers.1.ffn")["experts.gate"][expert] * scales
    values = np.rint(gate / (np.abs(gate).max(axis=1, keepdims=True) / 127))
    np.testing.assert_array_equal(model.made["layers.1.ffn"]["experts.gate.values"][expert], values)


def test_goes_on_from_what_is_written(step3):
    """Half of a model's blocks are there: the other half comes out as without an interruption."""
    whole, half = FloatModel(step3), FloatModel(step3)
    ids = tokens(whole, 2, 16)
    calibrated(whole, ids)
    half.made |= {name: whole.made[name] for name in all_layers(whole.config)[:4]}
    _, reports = calibrated(half, ids)
    assert [report.layer for report in reports] == [2, 3]
    for name, leaves in whole.made.items():
        for leaf, array in leaves.items():
            np.testing.assert_array_equal(half.made[name][leaf], array)


def test_a_text_is_cut_into_sequences():
    assert cut(range(10), CalibrationSettings(sequence=4), 100).tolist() == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    assert cut(range(10), CalibrationSettings(), 3).tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert cut(range(3), CalibrationSettings(), 100).tolist() == [[0, 1, 2]]
    with pytest.raises(ValueError, match="1 tokens, calibration needs at least 2"):
        cut([7], CalibrationSettings(), 100)
