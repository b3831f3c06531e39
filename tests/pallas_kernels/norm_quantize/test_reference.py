"""The definition in `jax.numpy` against NumPy, as the kernel is; and bad calls."""

import inspect

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.norm_quantize import rms_norm_quantize
from pallas_kernels.target import Target
from tests.pallas_kernels.norm_quantize.suite import NormQuantizeSuite


class TestReference(NormQuantizeSuite):
    target = Target("reference", "cpu")


def test_tpus_have_the_reference():
    suite = TestReference()
    arguments = (*suite.random(3, 256), "int8")
    expected = suite.run(*arguments)
    suite.target = Target("mosaic_tpu", "TPU v6 lite")
    for one, other in zip(suite.run(*arguments), expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("x", "weight", "format", "message"),
    [
        (jnp.zeros(3), jnp.ones(3), "fp8", r"x is float32\(3,\)"),
        (jnp.zeros((2, 0)), jnp.ones(0), "fp8", r"x is float32\(2, 0\)"),
        (jnp.zeros((2, 3), jnp.int32), jnp.ones(3), "int8", r"x is int32\(2, 3\)"),
        (jnp.zeros((2, 3)), jnp.ones(4), "int8", r"weight is float32\(4,\), needs float32\(3,\)"),
        (jnp.zeros((2, 3)), jnp.ones(3, jnp.bfloat16), "int8", r"weight is bfloat16\(3,\)"),
        (jnp.zeros((2, 3)), jnp.ones(3), "int4", "'int4', needs one of .*'fp8', 'int8'"),
    ],
)
def test_bad_calls(x, weight, format, message):
    """The errors that users see: `unwrap` removes the check of annotations."""
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(rms_norm_quantize)(x, weight, 1e-5, format)
