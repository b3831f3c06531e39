"""How the steps of a batch are cut into ranges."""

import jax.numpy as jnp

from pallas_kernels.attention.ranges import range_begin, range_of
from tests import golden


@golden.table("pallas_kernels/attention_ranges.yaml")
def test_ranges_are_cut(total, ranges, at, begins):
    total = jnp.int32(total)
    assert range_begin(jnp.asarray(at, jnp.int32), total, ranges).tolist() == begins
    for index, begin, end in zip(at, begins, begins[1:], strict=False):
        if begin < end:
            assert range_of(jnp.int32(begin), total, ranges) == index
            last = at[begins.index(end)] - 1
            assert range_of(jnp.int32(end - 1), total, ranges) == last
