"""Rows are gathered as many as there are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul.mosaic_tpu_pick import pick_rows


@pytest.mark.parametrize("count", [0, 1, 256, 257, 768])
def test_as_many_as_there_are(count):
    rng = np.random.default_rng(0)
    rows, source = rng.integers(-99, 99, (40, 3)).astype(np.int8), rng.integers(0, 40, 768)
    found = jax.jit(pick_rows)(rows, source.astype(np.int32), jnp.int32(count))
    np.testing.assert_array_equal(found[:count], rows[source[:count]])
