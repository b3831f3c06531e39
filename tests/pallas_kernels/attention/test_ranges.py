"""How the steps of a batch are cut into ranges."""

import jax.numpy as jnp
import pytest

from pallas_kernels.attention.ranges import range_begin, range_of


@pytest.mark.parametrize(
    ("total", "ranges", "at", "begins"),
    [
        (7, 3, [0, 1, 2, 3], [0, 3, 5, 7]),
        (2, 4, [0, 1, 2, 3, 4], [0, 1, 2, 2, 2]),  # the last two are empty
        (0, 4, [0, 1, 4], [0, 0, 0]),
        # 16,384 tokens of a prompt after 128K others, on 4 heads: times 264 beyond 32 bits.
        (17_825_792, 264, [0, 1, 2, 263, 264], [0, 67_522, 135_044, 17_758_271, 17_825_792]),
    ],
)
def test_ranges_are_cut(total, ranges, at, begins):
    total = jnp.int32(total)
    assert range_begin(jnp.asarray(at, jnp.int32), total, ranges).tolist() == begins
    for index, begin, end in zip(at, begins, begins[1:], strict=False):
        if begin < end:
            assert range_of(jnp.int32(begin), total, ranges) == index
            last = at[begins.index(end)] - 1
            assert range_of(jnp.int32(end - 1), total, ranges) == last
