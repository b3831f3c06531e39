import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.attention.rope import rotate, rotation
from jaxserve.config.model import Rope
from tests.reference import step3_numpy


def test_angles():
    """theta 100 and head_dim 4: frequencies 1 and 1/10."""
    cosine, sine = rotation(jnp.asarray([0, 2], jnp.int32), 4, Rope(theta=100.0))
    assert cosine.dtype == sine.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(cosine), [[1, 1], np.cos([2, 0.2])], rtol=1e-6)
    np.testing.assert_allclose(np.asarray(sine), [[0, 0], np.sin([2, 0.2])], rtol=1e-6)


def test_element_i_turns_with_element_i_plus_half():
    x = jnp.asarray([[[1.0, 1.0, 0.0, 0.0]]])
    turned = rotate(x, *rotation(jnp.asarray([2], jnp.int32), 4, Rope(theta=100.0)))
    expected = [np.cos(2), np.cos(0.2), np.sin(2), np.sin(0.2)]
    np.testing.assert_allclose(np.asarray(turned)[0, 0], expected, rtol=1e-6)


@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_against_numpy(theta):
    rng = np.random.default_rng(0)
    positions = np.asarray([0, 1, 17, 511, 2047, 65535], np.int32)
    x = rng.normal(size=(6, 3, 64)).astype(np.float32)
    turned = rotate(jnp.asarray(x), *rotation(jnp.asarray(positions), 64, Rope(theta=theta)))
    expected = step3_numpy.rotate(x.astype(np.float64), positions, theta)
    # An angle of 65535 radians has 4e-3 of a unit in the last place of FP32.
    tolerance = np.where(positions < 3000, 3e-4, 2e-2)[:, None, None]
    assert np.all(np.abs(np.asarray(turned) - expected) < tolerance)


def test_only_the_distance_of_two_positions_matters():
    rng = np.random.default_rng(1)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 32)), jnp.float32) for _ in range(2))

    def score(i: int, j: int) -> float:
        a = rotate(q, *rotation(jnp.asarray([i], jnp.int32), 32, Rope(theta=1e4)))
        b = rotate(k, *rotation(jnp.asarray([j], jnp.int32), 32, Rope(theta=1e4)))
        return float(jnp.sum(a * b))

    assert score(9, 2) == pytest.approx(score(107, 100), abs=1e-4)


def test_dtype_is_kept():
    x = jnp.ones((2, 1, 8), jnp.bfloat16)
    assert (
        rotate(x, *rotation(jnp.asarray([0, 3], jnp.int32), 8, Rope(theta=1e4))).dtype
        == jnp.bfloat16
    )
