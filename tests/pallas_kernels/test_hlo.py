"""Bytes that a fusion reads of its parameters: literal computations, as XLA writes them."""

from pallas_kernels.hlo import parts_read
from tests import golden

COMPUTATIONS = golden.text("pallas_kernels/programs/fusions.hlo")


def test_slices_need_what_they_keep():
    """Three of eight columns of all four parts; scales are few, and counted whole. What looks rows
    up is not known to need less than everything, and nothing is needed more than once."""
    found = parts_read(COMPUTATIONS)
    assert found["split"] == {0: 1.0, 1: 3 / 8}
    assert found["looked_up"] == {0: 1.0, 1: 1.0}
    assert found["add"] == {0: 1.0, 1: 1.0}
