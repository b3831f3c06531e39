"""The definition in `jax.numpy` against NumPy, as the kernel is; and bad calls."""

import numpy as np

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
