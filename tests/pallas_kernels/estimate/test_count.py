"""Counts of operations beside compiled programs."""

import numpy as np
import pytest

from pallas_kernels.estimate.count import expected_tiles


@pytest.mark.parametrize(
    ("mean", "tile"), [(128, 128), (192, 128), (205, 256), (0.3, 64), (1024, 128)]
)
def test_a_row_more_than_a_tile_takes_another_one(mean, tile):
    """A million groups whose rows are drawn."""
    rows = np.random.default_rng(0).poisson(mean, 1_000_000)
    assert expected_tiles(mean, tile) == pytest.approx(np.mean(-(-rows // tile)), rel=5e-3)
