"""Gain from calibration for a layer whose activations have outliers, by the serving product."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.bench.quality import write_outliers
from jaxserve.calibration import forward, layers
from jaxserve.calibration.layers import quantise_attention
from pallas_kernels.grouped_matmul.dense import matmul
from pallas_kernels.quantize import QuantArray, quantize_weight
from tests.jaxserve.calibration.float_model import FloatModel
from tests.reference.tiny_step3 import write_tiny_step3

pytestmark = pytest.mark.unoptimised


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_outliers(write_tiny_step3(folder / "tiny"), folder / "wide")
    return FloatModel(folder / "wide")


def rows_of(model, sequences, seed):
    ids = np.random.default_rng(seed).integers(2, 160, (sequences, 32))
    return model.floats("embedding")["table"][ids]


def relative_error(model, made, x):
    """The error of all that attention's matrices give, with INT8 activations as they are served."""
    floats = model.floats("layers.0.attention")
    _, inputs = forward.attend(model.config, model.config.layer(0).attention, floats, x)
    wrong = total = 0.0
    for name in ("attention.down", "attention.up", "attention.out"):
        scales, quantised = made(name, floats)
        found = matmul(jnp.asarray(inputs[name] / scales), quantised)
        right = inputs[name] @ floats[name].T
        wrong += float(np.square(found - right).mean() / np.square(right).mean())
        total += 1
    return np.sqrt(wrong / total)


def calibrated(model, x):
    block = model.floats("layers.0.attention")
    before = dict(block)
    _, inputs = forward.attend(model.config, model.config.layer(0).attention, block, x)
    matrices, _ = quantise_attention(model.config.layer(0).attention, block, inputs)

    def made(name, floats):
        values, scales = matrices[name]
        # What the fold multiplied these columns by, and divided these rows by.
        columns = block[name] / np.where(before[name] == 0, 1, before[name])
        column = np.median(columns, axis=0)
        row = np.median(columns / column, axis=1)
        return column, QuantArray(
            jnp.asarray(values), jnp.asarray(scales / row[:, None].astype(np.float32)), (1, 0)
        )

    return made


def test_smoothing_and_compensation_each_help(wide, monkeypatch):
    """On rows that the calibration did not see."""
    seen, x = rows_of(wide, 16, seed=1), rows_of(wide, 4, seed=2)

    def nearest(name, floats):
        return 1.0, quantize_weight(jnp.asarray(floats[name]), "int8")

    both = relative_error(wide, calibrated(wide, seen), x)
    with monkeypatch.context() as patch:
        patch.setattr(layers, "gptq", lambda weight, hessian: layers.rounded(weight))
        smooth = relative_error(wide, calibrated(wide, seen), x)
    with monkeypatch.context() as patch:
        patch.setattr(layers, "STRENGTHS", (0.0,))
        compensated = relative_error(wide, calibrated(wide, seen), x)
    rounded = relative_error(wide, nearest, x)
    assert rounded == pytest.approx(0.159, rel=0.02)
    assert compensated == pytest.approx(0.152, rel=0.02)
    assert smooth == pytest.approx(0.0093, rel=0.02)
    assert both == pytest.approx(0.0085, rel=0.02)


def test_outliers_are_the_same_function_in_fp32(wide, tmp_path):
    """The widest channel behind each norm is 32 to 100 times the median one."""
    plain = FloatModel(write_tiny_step3(tmp_path / "tiny"))
    x = rows_of(plain, 1, seed=3)
    for layer in range(2):
        blocks = [model.floats(f"layers.{layer}.attention") for model in (plain, wide)]
        kind = plain.config.layer(layer)
        first, second = (
            forward.attend(plain.config, kind.attention, block, x)[0] for block in blocks
        )
        np.testing.assert_array_equal(first, second)
        for name in ("input_norm", "attention.inter_norm", "post_norm"):
            ratio = np.abs(blocks[1][name]).max() / np.median(np.abs(blocks[0][name]))
            assert 32 <= ratio <= 100
        normed = [forward.normed_rows(plain.config, b["post_norm"], first) for b in blocks]
        routes = [
            forward.route(kind.ffn.router, block, rows) if layer == 1 else None
            for block, rows in zip(blocks, normed, strict=True)
        ]
        outputs = [
            forward.feed_forward(model.floats(f"layers.{layer}.ffn"), n, r)
            for model, n, r in zip((plain, wide), normed, routes, strict=True)
        ]
        np.testing.assert_array_equal(*outputs)
