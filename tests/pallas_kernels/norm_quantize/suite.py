"""Tests of every backend of `rms_norm_quantize`; subclasses say which one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.norm_quantize import rms_norm_quantize
from pallas_kernels.target import use_target
from tests.pallas_kernels.quantize.definition import VALUES, quantize_numpy


def norm_numpy(x, weight, epsilon):
    """In FP64; rounded where the definition rounds."""
    wide = x.astype(np.float64)
    normed = wide / np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    normed = normed.astype(x.dtype).astype(np.float32) * weight.astype(np.float32)
    return normed.astype(x.dtype)


class NormQuantizeSuite:
    """Rows of 256 columns unless a test says otherwise: few, since interpreting is slow."""

    target = None

    def run(self, x, weight, format, epsilon=1e-5):
        """The three results, as NumPy arrays."""
        with use_target(self.target):
            function = functools.partial(rms_norm_quantize, epsilon=epsilon, format=format)
            found = jax.jit(function)(x, weight)
        return tuple(map(np.asarray, found))

    def random(self, tokens, d, dtype=jnp.bfloat16):
        generator = np.random.default_rng(tokens * d)
        x = generator.normal(size=(tokens, d)) * np.exp2(generator.integers(-6, 6, (tokens, 1)))
        weight = generator.normal(1, 0.25, d)
        return jnp.asarray(x, dtype), jnp.asarray(weight, dtype)

    @pytest.mark.parametrize("format", ["fp8", "int8"])
    @pytest.mark.parametrize(
        ("tokens", "d", "dtype"),
        [
            (1, 128, jnp.bfloat16),
            (3, 256, jnp.float16),
            (5, 640, jnp.bfloat16),
            (3, 1024, jnp.float32),
            (2, 7168, jnp.bfloat16),
            (2, 192, jnp.bfloat16),  # no multiple of 128
            (1, 8320, jnp.bfloat16),  # too wide for the kernel
        ],
    )
    def test_against_numpy(self, tokens, d, dtype, format):
        """Normed to a step of the dtype; what is made of that is exact, but for XLA's freedom."""
        x, weight = self.random(tokens, d, dtype)
        # Of a wider array the first columns are taken.
        normed, values, scales = self.run(jnp.concatenate([x, -9 * x], axis=1), weight, format)
        assert normed.dtype == dtype
        assert values.dtype == VALUES[format]
        expected = norm_numpy(np.asarray(x), np.asarray(weight), 1e-5)
        step = 2 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(
            normed.astype(np.float32), expected.astype(np.float32), rtol=step, atol=1e-6
        )
        expected_values, expected_scales = quantize_numpy(normed, format)
        # XLA may leave out that normed rows are rounded on their way.
        np.testing.assert_allclose(scales, expected_scales, rtol=step)
        steps = np.asarray(values, np.float32) - np.asarray(expected_values, np.float32)
        allowed = 1 if format == "int8" else np.abs(expected_values.astype(np.float32)) / 8 + 2**-9
        assert np.all(np.abs(steps) <= allowed)

    @pytest.mark.parametrize("format", ["fp8", "int8"])
    def test_exact(self, format):
        """Squares whose mean is a power of 4, in whatever order they are added: every bit."""
        row = np.asarray([1, -2, 3, -1, 4, 0, 0, 1] * 32)  # mean of squares 4
        x = jnp.asarray(np.stack([row, row[::-1], -2 * row]), jnp.bfloat16)
        weight = jnp.asarray([1, 0.5] * 128, jnp.bfloat16)
        normed, values, scales = self.run(x, weight, format, epsilon=0.0)
        factors = np.asarray([1, 0.5] * 128)
        expected = np.stack([row * factors, row[::-1] * factors, -row * factors]) / 2
        np.testing.assert_array_equal(normed.astype(np.float64), expected)
        for rows, found in (expected, (values, scales)), (x, self.run(x, None, format)[1:]):
            made = quantize_numpy(np.asarray(rows, np.float32), format)
            for one, other in zip(found, made, strict=True):
                np.testing.assert_array_equal(one, other)

    def test_literal(self):
        """The norm of 3, 4 and zeros is 12 times 3, 4: 5 is what the squares' sum is the square
        of, and 256 numbers are 16 ^ 2."""
        x = np.zeros((1, 256))
        x[0, :2] = 3, -4
        normed, values, scales = self.run(
            jnp.asarray(x, jnp.float32), jnp.full(256, 2.0, jnp.float32), "int8", epsilon=0.0
        )
        np.testing.assert_allclose(normed[0, :3], [19.2, -25.6, 0], rtol=1e-6)
        np.testing.assert_array_equal(values[0, :3], [95, -127, 0])
        np.testing.assert_allclose(scales, [25.6 / 127], rtol=1e-6)

    @pytest.mark.parametrize("tokens", [0, 2])
    @pytest.mark.parametrize("format", ["fp8", "int8"])
    def test_rows_of_zeros(self, format, tokens):
        """Zeros and the scale 1; also where epsilon is all that is under the root."""
        normed, values, scales = self.run(
            jnp.zeros((tokens, 256), jnp.bfloat16), jnp.ones(256, jnp.bfloat16), format
        )
        assert normed.shape == values.shape == (tokens, 256)
        assert values.dtype == VALUES[format]
        assert not normed.astype(np.float32).any()
        assert not values.astype(np.float32).any()
        np.testing.assert_array_equal(scales, np.ones(tokens))

    @pytest.mark.parametrize("poison", [np.nan, np.inf])
    def test_what_is_not_finite_stays_in_its_row(self, poison):
        x, weight = self.random(3, 256)
        clean = self.run(x, weight, "fp8")
        poisoned = self.run(x.at[1, 17].set(poison), weight, "fp8")
        for before, after in zip(clean, poisoned, strict=True):
            np.testing.assert_array_equal(
                before[[0, 2]].astype(np.float32), after[[0, 2]].astype(np.float32)
            )
        _, values, scales = poisoned
        assert np.isnan(values[1].astype(np.float32) * scales[1]).any()
