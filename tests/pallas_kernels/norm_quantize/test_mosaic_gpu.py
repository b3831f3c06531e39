"""The Hopper kernel, interpreted on the CPU with a race detector, and what it covers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.norm_quantize import mosaic_gpu
from pallas_kernels.target import Target
from tests.pallas_kernels.norm_quantize.suite import NormQuantizeSuite
from tests.pallas_kernels.quantize.definition import quantize_numpy

TARGET = Target("mosaic_gpu", "NVIDIA H200", interpret=True)


class TestMosaicGpu(NormQuantizeSuite):
    target = TARGET


@pytest.mark.parametrize("format", ["fp8", "int8"])
def test_values_are_those_of_the_normed_rows(format):
    """Bit for bit, in FP32: of BF16 the interpreter, which is XLA, may leave out the rounding."""
    x, weight = TestMosaicGpu().random(3, 384, jnp.float32)
    found = mosaic_gpu.rms_norm_quantize(x, weight, 1e-5, format, TARGET)
    normed, values, scales = map(np.asarray, found)
    expected_values, expected_scales = quantize_numpy(normed, format)
    np.testing.assert_array_equal(values, expected_values)
    np.testing.assert_array_equal(scales, expected_scales)


@pytest.mark.parametrize(("tokens", "d"), [(128, 7168), (1, 128), (16384, 8192), (0, 7168)])
def test_what_the_kernel_covers(tokens, d):
    target = Target("mosaic_gpu", "NVIDIA H200")
    call = functools.partial(
        mosaic_gpu.rms_norm_quantize, epsilon=1e-5, format="fp8", target=target
    )
    arrays = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((tokens, d), (d,)))
    assert ("rms_norm_quantize" in str(jax.make_jaxpr(call)(*arrays))) == bool(tokens)
