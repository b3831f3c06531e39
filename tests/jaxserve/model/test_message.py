"""Rows of a wire format with their norm; `test_message.py` has what they are on the wire."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config.formats import choices
from jaxserve.model.message import encode_rows, norm_and_encode_rows, storage
from jaxserve.model.module import rms_norm

X = np.asarray([[1.0, -2.0, 0.5, 0.0], [3e-3, 1e-3, 0.0, -4e-3]], np.float32)


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
