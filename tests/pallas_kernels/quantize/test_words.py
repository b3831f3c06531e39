"""Arrays in words of 32 bits hold them as a TPU's registers do, also where arrays share a pool."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.quantize.words import Words, entry_words, in_lines


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32])
def test_words_are_bit_casts_of_registers(dtype):
    values = (jnp.arange(3 * 64 * 128).reshape(3, 64, 128) % 127).astype(dtype)
    array = jax.ShapeDtypeStruct(values.shape, values.dtype)
    pool = jnp.pad(in_lines(values), ((2, 0), (0, 0), (0, 0)))  # behind two other entries
    assert pool.size == 5 * entry_words(array)
    words = Words.in_pool(pool, array, 2)
    assert (words.shape, words.dtype) == (values.shape, values.dtype)
    np.testing.assert_array_equal(words.array(), values)
    np.testing.assert_array_equal(words.holding(values[::-1]).array(), values[::-1])
    np.testing.assert_array_equal(words.lines(), pool.reshape(-1, 128))

    def kernel(given, out):
        out[...] = pltpu.bitcast(given[...], out.dtype)

    found = pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct((64, 128), dtype), interpret=pltpu.InterpretParams()
    )(words.words[3])
    np.testing.assert_array_equal(found, values[1])
    turned = jnp.swapaxes(values, 1, 2)  # rows of 64, which lie with the rows last
    words = Words.in_pool(pool, turned, 2)
    np.testing.assert_array_equal(words.array(), turned)
    np.testing.assert_array_equal(words.holding(turned[::-1]).array(), turned[::-1])
