"""The definition in `jax.numpy` against NumPy, as the kernels are."""

from pallas_kernels.target import Target
from tests.pallas_kernels.grouped_matmul.suite import GroupedMatmulSuite


class TestReference(GroupedMatmulSuite):
    target = Target("reference", "cpu")
