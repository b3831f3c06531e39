"""GPTQ against the paper's equations, carried out one weight at a time."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.calibration.gptq import INT8, Hessian, RoundingTarget, gptq, rounded
from pallas_kernels.quantize import quantize_weight


def obq(weight, rows, order):
    """Each row by equations 2 and 3 of arXiv 2210.17323: the best update of what is left behind a
    rounded weight, then the inverse Hessian without it (one step of Gaussian elimination)."""
    moments = rows.T @ rows
    moments = moments + 0.01 * np.mean(np.diag(moments)) * np.eye(len(moments))
    values = np.zeros(weight.shape, int)
    for channel, start in enumerate(weight):
        left, inverse, scale = start.copy(), np.linalg.inv(moments), np.abs(start).max() / 127
        for q in order:
            near = np.clip(np.rint(left[q] / scale), -127, 127)
            values[channel, q] = near
            left -= (left[q] - near * scale) / inverse[q, q] * inverse[:, q]
            inverse = inverse - np.outer(inverse[:, q], inverse[q]) / inverse[q, q]
            inverse[q], inverse[:, q] = 0, 0
            inverse[q, q] = 1
            left[q] = 0
    return values


def correlated(samples, d_in, seed):
    rng = np.random.default_rng(seed)
    mixing = rng.normal(size=(d_in, d_in)) * np.geomspace(8, 0.05, d_in)[:, None]
    return (rng.normal(size=(samples, d_in)) @ mixing).astype(np.float32)


def test_is_the_papers_rounding():
    """150 columns: more than a block of 128."""
    rows = correlated(400, 150, seed=1)
    weight = np.random.default_rng(2).normal(size=(5, 150)).astype(np.float32)
    found = gptq(weight, Hessian(rows))
    expected = obq(weight.astype(np.float64), rows.astype(np.float64), Hessian(rows).order)
    assert np.mean(found.values == expected) > 0.99  # FP32 rounds a few ties the other way
    assert np.abs(found.values - expected).max() <= 1
    np.testing.assert_allclose(found.scales[:, 0], np.abs(weight).max(axis=1) / 127, rtol=1e-6)


def test_small_matrix():
    """Two inputs that are almost the same: the second weight makes up for the first one's error of
    0.4 steps, so that 10.4 + 20.4 stays 31 in place of 30."""
    rows = np.array([[1, 1, 0], [1, 1, 0], [1, 0.999, 0]], np.float32)
    weight = np.array([[10.4, 20.4, 127.0]], np.float32)
    assert rounded(weight).values.tolist() == [[10, 20, 127]]
    assert gptq(weight, Hessian(rows)).values.tolist() == [[10, 21, 127]]


def test_nothing_known_is_rounding_to_the_nearest():
    weight = np.random.default_rng(5).normal(size=(3, 8)).astype(np.float32)
    weight[1] = 0
    found, nearest = gptq(weight, Hessian(np.zeros((4, 8)))), rounded(weight)
    kernels = quantize_weight(jnp.asarray(weight), "int8")
    for made in (found, nearest):
        np.testing.assert_array_equal(made.values, kernels.values)
        np.testing.assert_array_equal(made.scales, kernels.scales)


def test_fewer_samples_than_columns():
    """Four samples of 32 inputs: damping makes the inverse exist."""
    rows = correlated(4, 32, seed=6)
    weight = np.random.default_rng(7).normal(size=(4, 32)).astype(np.float32)
    found = gptq(weight, Hessian(rows))
    better = np.square(rows @ (found.floats - weight).T).sum()
    assert better < 0.2 * np.square(rows @ (rounded(weight).floats - weight).T).sum()


def test_groups_of_int4():
    """The largest of a group is 7 scales, or that times 0.95, 0.9, 0.85 or 0.8, whichever makes the
    squared error smallest: 0.0173 for 0.0204 in the first group, 0.85 for 1 in the second."""
    found = rounded(
        np.array([[1.0, 2.0, 7.0, -14.0]], np.float32), RoundingTarget(4, 2, int8_rows=False)
    )
    assert found.values.tolist() == [[4, 7, 4, -7]]
    np.testing.assert_allclose(found.scales, [[1.9 / 7, 1.9]], rtol=1e-6)
    np.testing.assert_allclose(found.floats, [[7.6 / 7, 1.9, 7.6, -13.3]], rtol=1e-6)


@pytest.mark.parametrize("target", [INT8, RoundingTarget(4, 32, int8_rows=False)])
def test_errors_of_products_fall(target):
    rows = correlated(300, 64, seed=3)
    weight = np.random.default_rng(4).normal(size=(16, 64)).astype(np.float32)
    errors: list[float] = []
    for made in (rounded(weight, target), gptq(weight, Hessian(rows), target)):
        groups = 64 // (target.group or 64)
        assert (made.scales.shape, np.abs(made.values).max()) == ((16, groups), target.largest)
        spread = np.repeat(made.scales.astype(np.float64), 64 // groups, axis=1)
        np.testing.assert_allclose(made.floats, made.values * spread, rtol=1e-6)
        errors.append(float(np.square(rows @ (made.values * spread - weight).T).sum()))
    assert errors[1] < 0.3 * errors[0]
