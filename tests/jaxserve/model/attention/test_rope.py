import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config.model import Rope, Yarn
from jaxserve.model.attention.rope import frequencies, rotation
from pallas_kernels.rotate_and_write import rotate

DEEPSEEK_V3 = Rope(theta=1e4, yarn=Yarn(factor=40.0, original_positions=4096), interleaved=True)
KIMI_K2 = Rope(
    theta=5e4,
    yarn=Yarn(factor=32.0, original_positions=4096, beta_fast=1.0, beta_slow=1.0),
    interleaved=True,
)


def test_angles():
    """theta 100 and head_dim 4: frequencies 1 and 1/10."""
    cosine, sine = rotation(jnp.asarray([0, 2], jnp.int32), 4, Rope(theta=100.0))
    assert cosine.dtype == sine.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(cosine), [[1, 1], np.cos([2, 0.2])], rtol=1e-6)
    np.testing.assert_allclose(np.asarray(sine), [[0, 0], np.sin([2, 0.2])], rtol=1e-6)


@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_against_numpy(theta):
    rng = np.random.default_rng(0)
    positions = np.asarray([0, 1, 17, 511, 2047, 65535], np.int32)
    x = rng.normal(size=(6, 3, 64)).astype(np.float32)
    turned = rotate(jnp.asarray(x), *rotation(jnp.asarray(positions), 64, Rope(theta=theta)))
    angles = positions[:, None] * theta ** (-np.arange(32) / 32)
    pairs = (x[..., :32] + 1j * x[..., 32:]) * np.exp(1j * angles)[:, None]
    expected = np.concatenate([pairs.real, pairs.imag], axis=-1)
    # An angle of 65535 radians has 4e-3 of a unit in the last place of FP32.
    tolerance = np.where(positions < 3000, 3e-4, 2e-2)[:, None, None]
    assert np.all(np.abs(np.asarray(turned) - expected) < tolerance)


class TestYarn:
    """Pairs before the ramp keep their frequency, those behind it are slowed by the factor."""

    @pytest.mark.parametrize(("rope", "low", "high"), [(DEEPSEEK_V3, 10, 23), (KIMI_K2, 19, 20)])
    def test_ramp_of_the_released_models(self, rope, low, high):
        plain = rope.theta ** (-np.arange(32) / 32)
        ratio = frequencies(rope, 64) / plain
        np.testing.assert_allclose(ratio[: low + 1], 1, rtol=1e-6)
        np.testing.assert_allclose(ratio[high:], 1 / rope.yarn.factor, rtol=1e-6)
        inside = (np.arange(low, high + 1) - low) / (high - low)
        expected = 1 - inside + inside / rope.yarn.factor
        np.testing.assert_allclose(ratio[low : high + 1], expected, rtol=1e-6)
        assert np.all(np.diff(ratio) <= 1e-6)

    def test_a_ramp_without_length(self):
        """Both borders lie at 0: pair 0 keeps its frequency, all others are slowed."""
        yarn = Yarn(factor=4.0, original_positions=2, beta_fast=1.0, beta_slow=1.0)
        ratio = frequencies(Rope(theta=1e4, yarn=yarn), 8) / frequencies(Rope(theta=1e4), 8)
        np.testing.assert_allclose(ratio, [1, 0.25, 0.25, 0.25], rtol=1e-6)

    def test_borders_that_are_not_rounded(self):
        """low 10.47 and high 22.51 of DeepSeek-V3's numbers."""
        yarn = Yarn(factor=40.0, original_positions=4096, truncate=False)
        ratio = frequencies(Rope(theta=1e4, yarn=yarn), 64) / frequencies(Rope(theta=1e4), 64)
        low, high = (64 * np.log(4096 / (2 * np.pi * n)) / (2 * np.log(1e4)) for n in (32, 1))
        assert (round(low, 2), round(high, 2)) == (10.47, 22.51)
        share = np.clip((np.arange(32) - low) / (high - low), 0, 1)
        np.testing.assert_allclose(ratio, 1 - share + share / 40, rtol=1e-6)

    def test_magnitude_is_a_factor_of_both_waves(self):
        position = jnp.asarray([0, 3], jnp.int32)
        yarn = Yarn(factor=4.0, original_positions=64, magnitude=1.5)
        plain = Yarn(factor=4.0, original_positions=64)
        cosine, sine = rotation(position, 8, Rope(theta=1e4, yarn=yarn))
        one = rotation(position, 8, Rope(theta=1e4, yarn=plain))
        np.testing.assert_allclose(np.asarray(cosine), 1.5 * np.asarray(one[0]), rtol=1e-6)
        np.testing.assert_allclose(np.asarray(sine), 1.5 * np.asarray(one[1]), rtol=1e-6)
        assert np.asarray(cosine)[0].tolist() == [1.5] * 4
