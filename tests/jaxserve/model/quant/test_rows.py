import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxserve.model.module import rms_norm
from jaxserve.model.quant.rows import (
    STORAGE,
    decode_rows,
    encode_rows,
    has_scales,
    norm_and_encode_rows,
    quantize_heads,
)

X = np.asarray([[1.0, -2.0, 0.5, 0.0], [3e-3, 1e-3, 0.0, -4e-3]], np.float32)


def test_only_8_bit_formats_have_scales():
    assert {name: has_scales(name) for name in STORAGE} == {
        "float32": False,
        "bfloat16": False,
        "fp8": True,
        "int8": True,
    }


@pytest.mark.parametrize("rows", ["float32", "bfloat16"])
def test_casts(rows):
    values, scales = encode_rows(jnp.asarray(X), rows)
    assert scales is None
    assert values.dtype == STORAGE[rows]
    np.testing.assert_array_equal(np.asarray(values), X.astype(STORAGE[rows]))
    np.testing.assert_array_equal(
        np.asarray(decode_rows(values, None, jnp.dtype(jnp.float32))),
        X.astype(STORAGE[rows]).astype(np.float32),
    )


def test_int8():
    values, scales = encode_rows(jnp.asarray(X), "int8")
    np.testing.assert_array_equal(np.asarray(values), [[64, -127, 32, 0], [95, 32, 0, -127]])
    np.testing.assert_allclose(np.asarray(scales), [2 / 127, 4e-3 / 127], rtol=1e-6)


def test_fp8():
    """Of the largest magnitude the scale makes 448; e4m3 has three bits of mantissa."""
    values, scales = encode_rows(jnp.asarray(X), "fp8")
    assert values.dtype == ml_dtypes.float8_e4m3fn
    np.testing.assert_array_equal(
        np.asarray(values, np.float32), [[224, -448, 112, 0], [320, 112, 0, -448]]
    )
    np.testing.assert_allclose(np.asarray(scales), [2 / 448, 4e-3 / 448], rtol=1e-6)


@pytest.mark.parametrize("rows", list(STORAGE))
def test_normed_and_encoded_is_normed_then_encoded(rows):
    weight = jnp.asarray([1.0, 0.5, 2.0, 1.5])
    normed, encoded = norm_and_encode_rows(jnp.asarray(X), weight, 1e-5, rows)
    expected = rms_norm(jnp.asarray(X), weight, 1e-5)
    np.testing.assert_array_equal(normed, expected)
    values, scales = encode_rows(expected, rows)
    assert encoded.values.dtype == STORAGE[rows]
    np.testing.assert_array_equal(encoded.values, values)
    assert (encoded.scales is None) == (scales is None)
    if scales is not None:
        np.testing.assert_array_equal(encoded.scales, scales)


@pytest.mark.parametrize(("rows", "tolerance"), [("int8", 0.5 / 127), ("fp8", 1 / 16)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_comes_back_within_half_a_step(rows, tolerance, dtype):
    x = np.random.default_rng(0).normal(size=(16, 64)).astype(dtype)
    back = decode_rows(*encode_rows(jnp.asarray(x), rows), jnp.dtype(dtype))
    assert back.dtype == dtype
    error = np.abs(np.asarray(back, np.float32) - np.asarray(x, np.float32))
    largest = np.abs(np.asarray(x, np.float32)).max(axis=1, keepdims=True)
    assert np.all(error <= largest * (tolerance + 2.0**-8 * (dtype == jnp.bfloat16)))


def test_heads_have_their_own_scales():
    values, scales = quantize_heads(
        jnp.asarray([[[254.0, 2], [0, 0]], [[1.27, -1.27], [0, 127]]]), "int8"
    )
    np.testing.assert_array_equal(values, [[[127, 1], [0, 0]], [[127, -127], [0, 127]]])
    np.testing.assert_allclose(scales, [[2, 1], [0.01, 1]], rtol=1e-6)


@pytest.mark.parametrize("row_format", ["fp8", "int8"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_heads_are_rows(row_format, dtype):
    """A token's head is quantised as a row of its own would be."""
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3, 24)), dtype)
    values, scales = quantize_heads(rows, row_format)
    assert values.dtype == STORAGE[row_format]
    assert values.shape == rows.shape
    for head in range(3):
        expected_values, expected_scales = encode_rows(rows[:, head], row_format)
        np.testing.assert_array_equal(scales[:, head], expected_scales)
        np.testing.assert_array_equal(
            np.asarray(values[:, head], np.float32), np.asarray(expected_values, np.float32)
        )


def test_no_tokens_no_heads():
    values, scales = quantize_heads(jnp.zeros((0, 2, 4)), "fp8")
    assert values.shape == (0, 2, 4)
    assert scales.shape == (0, 2)
