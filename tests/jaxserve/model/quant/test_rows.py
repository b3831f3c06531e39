"""Rows of a wire format; what quantising is stands in `tests/pallas_kernels/quantize`."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config.formats import choices
from jaxserve.model.module import rms_norm
from jaxserve.model.quant.rows import (
    decode_rows,
    encode_rows,
    has_scales,
    norm_and_encode_rows,
    storage,
)
from tests.pallas_kernels.quantize.definition import quantize_numpy

X = np.asarray([[1.0, -2.0, 0.5, 0.0], [3e-3, 1e-3, 0.0, -4e-3]], np.float32)
FLOAT32 = jnp.dtype(jnp.float32)


@pytest.mark.parametrize("rows", choices("dispatch"))
def test_rows_are_cast_or_quantised(rows):
    values, scales = encode_rows(jnp.asarray(X), rows)
    assert values.dtype == storage(rows)
    assert has_scales(rows) == (rows in ("fp8", "int8")) == (scales is not None)
    expected, steps = quantize_numpy(X, rows) if has_scales(rows) else (X.astype(storage(rows)), 1)
    np.testing.assert_array_equal(values, expected)
    back = decode_rows(values, scales, FLOAT32)
    assert back.dtype == FLOAT32
    meaning = expected.astype(np.float32) * np.reshape(steps, (-1, 1))
    np.testing.assert_allclose(back, meaning, rtol=1e-6)
    if scales is not None:
        np.testing.assert_array_equal(scales, steps)


@pytest.mark.parametrize("rows", choices("dispatch"))
def test_normed_and_encoded_is_normed_then_encoded(rows):
    weight = jnp.asarray([1.0, 0.5, 2.0, 1.5])
    normed, encoded = norm_and_encode_rows(jnp.asarray(X), weight, 1e-5, rows)
    expected = rms_norm(jnp.asarray(X), weight, 1e-5)
    np.testing.assert_array_equal(normed, expected)
    values, scales = encode_rows(expected, rows)
    assert encoded.values.dtype == storage(rows)
    np.testing.assert_array_equal(encoded.values, values)
    assert (encoded.scales is None) == (scales is None)
    if scales is not None:
        np.testing.assert_array_equal(encoded.scales, scales)
