"""`quantize_rows` and `dequantize_rows` against literal expectations and a NumPy definition."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pallas_kernels.quantize import dequantize_rows, quantize_rows
from tests.pallas_kernels.quantize.definition import quantize_numpy

compiled_quantize_rows = jax.jit(quantize_rows, static_argnums=1)
compiled_dequantize_rows = jax.jit(dequantize_rows, static_argnums=2)


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

    @pytest.mark.parametrize("tokens", [0, 2])
    @pytest.mark.parametrize("format", ["fp8", "int8"])
    def test_rows_of_zeros(self, format, tokens):
        values, scales = quantize_rows(jnp.zeros((tokens, 3)), format)
        np.testing.assert_array_equal(values.astype(jnp.float32), np.zeros((tokens, 3)))
        np.testing.assert_array_equal(scales, np.ones(tokens))


@st.composite
def finite_rows(draw, dtype):
    """Rows [4, 8] of any finite bit patterns: zeros, subnormals and the largest ones too."""
    bits = np.uint16 if dtype == jnp.bfloat16 else np.uint32
    rows = draw(arrays(bits, (4, 8))).view(dtype)
    # Bit patterns are of all sizes, and a row is as large as its largest entry: in some rows the
    # entries are near each other.
    for row in range(4):
        if draw(st.booleans()):
            largest = draw(st.floats(-149, 126))
            spread = draw(arrays(np.float32, 8, elements=st.floats(-1.875, 1.875, width=32)))
            rows[row] = (spread.astype(np.float64) * 2.0**largest).astype(dtype)
    return np.where(np.isfinite(rows), rows, np.asarray(0, dtype))


class TestAllFiniteInputs:
    """The same as NumPy's, bit for bit, compiled or not, and never further off than it must be."""

    @pytest.mark.parametrize("format", ["fp8", "int8"])
    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    @given(data=st.data())
    def test_compiled(self, format, dtype, data):
        x = data.draw(finite_rows(dtype))
        values, scales = compiled_quantize_rows(jnp.asarray(x), format)
        expected_values, expected_scales = quantize_numpy(x, format)
        np.testing.assert_array_equal(scales, expected_scales)
        np.testing.assert_array_equal(values, expected_values)

        back = np.asarray(compiled_dequantize_rows(values, scales, jnp.float32), np.float64)
        exact = x.astype(np.float64)
        scale = np.asarray(scales, np.float64)[:, None]
        if format == "int8":
            # Half a step, and what was rounded in FP32 before.
            bound = scale * (0.5 + 127 * 2.0**-23)
        else:
            # Half a step of a 3-bit mantissa, or of the subnormal numbers.
            bound = np.maximum(np.abs(exact) * 2.0**-4, scale * 2.0**-10) * (1 + 1e-5)
        assert (np.abs(back - exact) <= bound).all()

    @pytest.mark.parametrize("format", ["fp8", "int8"])
    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_operation_by_operation(self, format, dtype):
        """A compiler may fuse and rewrite; the result must not depend on whether it does."""
        x = np.random.default_rng(0).normal(size=(256, 1024)).astype(dtype)
        expected_values, expected_scales = quantize_numpy(x, format)
        for function in (quantize_rows, compiled_quantize_rows):
            values, scales = function(jnp.asarray(x), format)
            np.testing.assert_array_equal(scales, expected_scales)
            np.testing.assert_array_equal(values, expected_values)

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    @pytest.mark.parametrize("format", ["fp8", "int8"])
    def test_the_largest_number_stays_finite(self, format, dtype):
        largest = float(jnp.finfo(dtype).max)
        x = jnp.asarray([[largest, -largest, 0, 1]], dtype)
        output = dequantize_rows(*quantize_rows(x, format), dtype).astype(jnp.float32)
        np.testing.assert_allclose(output[0], [largest, -largest, 0, 0], rtol=2e-7)

    @pytest.mark.parametrize("format", ["fp8", "int8"])
    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_a_row_that_is_not_finite_shows_it(self, format, bad):
        x = jnp.asarray([[1.0, bad, 2.0], [1.0, 1.0, 1.0]])
        output = dequantize_rows(*quantize_rows(x, format), jnp.float32)
        assert np.isnan(output[0]).all()
        np.testing.assert_allclose(output[1], [1.0, 1.0, 1.0], rtol=1e-6)

    @pytest.mark.parametrize("format", ["fp8", "int8"])
    def test_every_8_bit_value_comes_back(self, format):
        """Dequantised rows, quantised again, are the same rows."""
        bits = np.arange(256, dtype=np.uint8)
        values = bits.view(ml_dtypes.float8_e4m3fn if format == "fp8" else np.int8)
        values = values[np.isfinite(values.astype(np.float32)) & (values != np.asarray(-128))]
        x = dequantize_rows(jnp.asarray(values[None]), jnp.asarray([0.25]), jnp.float32)
        again, scales = quantize_rows(x, format)
        np.testing.assert_array_equal(scales, [0.25])
        np.testing.assert_array_equal(np.asarray(again[0], np.float32), values.astype(np.float32))
