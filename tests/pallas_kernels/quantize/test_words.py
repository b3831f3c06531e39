"""Arrays in words of 32 bits hold them as a TPU's registers do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.quantize import Words


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32])
def test_words_are_bit_casts_of_registers(dtype):
    array = jnp.arange(3 * 64 * 128).reshape(3, 64, 128) % 127
    array = array.astype(dtype)
    words = Words.of(array)
    assert (words.shape, words.dtype) == (array.shape, array.dtype)
    np.testing.assert_array_equal(words.array(), array)

    def kernel(given, out):
        out[...] = pltpu.bitcast(given[...], out.dtype)

    found = pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct((64, 128), dtype), interpret=pltpu.InterpretParams()
    )(words.words[1])
    np.testing.assert_array_equal(found, array[1])
