"""The suite for plain XLA."""

from pallas_kernels.target import Target
from tests.pallas_kernels.attention.suite import PagedAttentionSuite


class TestReference(PagedAttentionSuite):
    target = Target("reference", "cpu")
