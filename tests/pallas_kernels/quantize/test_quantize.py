"""`quantize_rows` and `dequantize_rows` against literal expectations and a NumPy definition."""

import inspect

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.quantize import dequantize_rows, quantize_rows


class TestLiteral:
    def test_int8_rounds_half_to_even(self):
        values, scales = quantize_rows(
            jnp.asarray([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0]]), "int8"
        )
        assert values.dtype == jnp.int8
        np.testing.assert_array_equal(values, [[127, 0, 2, 2, 0, -2, -127]])
        np.testing.assert_array_equal(scales, [1.0])

    def test_fp8(self):
        # Between 16 and 32 the step is 2: 17 lies half way and goes to the even 16, 19 to 20.
        values, scales = quantize_rows(jnp.asarray([[896.0, -896.0, 34.0, 38.0, 0.0]]), "fp8")
        assert values.dtype == jnp.float8_e4m3fn
        np.testing.assert_array_equal(values.astype(jnp.float32), [[448, -448, 16, 20, 0]])
        np.testing.assert_array_equal(scales, [2.0])

    @pytest.mark.parametrize("format", ["fp8", "int8"])
    def test_zero_row(self, format):
        values, scales = quantize_rows(jnp.zeros((2, 3)), format)
        np.testing.assert_array_equal(values.astype(jnp.float32), np.zeros((2, 3)))
        np.testing.assert_array_equal(scales, [1.0, 1.0])

    def test_rows_have_their_own_scales(self):
        values, scales = quantize_rows(jnp.asarray([[254.0, 2.0], [-1.27, 1.27]]), "int8")
        np.testing.assert_array_equal(values, [[127, 1], [-127, 127]])
        np.testing.assert_allclose(scales, [2.0, 0.01], rtol=1e-6)

    def test_dequantize(self):
        values = jnp.asarray([[3, -4], [5, 0]], jnp.int8)
        output = dequantize_rows(values, jnp.asarray([0.5, 2.0]), jnp.bfloat16)
        assert output.dtype == jnp.bfloat16
        np.testing.assert_array_equal(output.astype(jnp.float32), [[1.5, -2], [10, 0]])

    @pytest.mark.parametrize("format", ["fp8", "int8"])
    def test_no_tokens(self, format):
        values, scales = quantize_rows(jnp.zeros((0, 3)), format)
        assert values.shape == (0, 3)
        assert scales.shape == (0,)


class TestBadCalls:
    """What users see, who do not run with the annotations checked: `unwrap` removes that check."""

    @pytest.mark.parametrize(
        ("x", "format", "message"),
        [
            (jnp.zeros(3), "fp8", r"x is float32\(3,\)"),
            (jnp.zeros((2, 0)), "fp8", r"x is float32\(2, 0\)"),
            (jnp.zeros((2, 3), jnp.int32), "int8", r"x is int32\(2, 3\)"),
            (jnp.zeros((2, 3)), "int4", "'int4', needs one of .*'fp8', 'int8'"),
        ],
    )
    def test_quantize(self, x, format, message):
        with pytest.raises(ValueError, match=message):
            inspect.unwrap(quantize_rows)(x, format)

    @pytest.mark.parametrize(
        ("values", "scales", "dtype", "message"),
        [
            (jnp.zeros((2, 3)), jnp.ones(2), jnp.float32, r"values is float32\(2, 3\)"),
            (jnp.zeros((2, 3), jnp.int8), jnp.ones(3), jnp.float32, r"scales is float32\(3,\)"),
            (jnp.zeros((2, 3), jnp.int8), jnp.ones(2), jnp.int32, "needs a float type"),
        ],
    )
    def test_dequantize(self, values, scales, dtype, message):
        with pytest.raises(ValueError, match=message):
            inspect.unwrap(dequantize_rows)(values, scales, dtype)


@pytest.mark.parametrize("format", ["fp8", "int8"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_matches_numpy(format, dtype):
    x = np.random.default_rng(0).normal(size=(16, 300)).astype(dtype)
    values, scales = jax.jit(quantize_rows, static_argnums=1)(jnp.asarray(x), format)
    rows = x.astype(np.float32)
    largest = np.float32(448 if format == "fp8" else 127)
    expected_scales = np.abs(rows).max(axis=1) * (np.float32(1) / largest)
    scaled = np.clip(rows / expected_scales[:, None], -largest, largest)
    if format == "fp8":
        expected = scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    else:
        expected = np.rint(scaled)
    np.testing.assert_array_equal(scales, expected_scales)
    np.testing.assert_array_equal(np.asarray(values, np.float32), expected)
