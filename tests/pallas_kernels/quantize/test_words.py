"""Arrays in words of 32 bits hold them as a TPU's registers do, also where arrays share a pool."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.quantize.words import Words, entry_words


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32])
def test_words_are_bit_casts_of_registers(dtype):
    values = (jnp.arange(3 * 64 * 128).reshape(3, 64, 128) % 127).astype(dtype)
    array = jax.ShapeDtypeStruct(values.shape, values.dtype)
    pool = jnp.zeros((5 * entry_words(array) // 128, 128), jnp.int32)
    pool = Words.written(pool, values, 2, array)  # behind two other entries
    words = Words.in_pool(pool, array, 2)
    assert (words.shape, words.dtype) == (values.shape, values.dtype)
    np.testing.assert_array_equal(words.array(), values)
    np.testing.assert_array_equal(words.holding(values[::-1]).array(), values[::-1])
    np.testing.assert_array_equal(words.pool(), pool)

    def kernel(given, out):
        out[...] = pltpu.bitcast(given[...], out.dtype)

    found = pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct((64, 128), dtype), interpret=pltpu.InterpretParams()
    )(words.words[3])
    np.testing.assert_array_equal(found, values[1])
