"""The cycle formulas that lanes are measured against."""

import pytest

from jaxserve.bench.overlap import ideal_gains


@pytest.mark.parametrize(
    ("attend", "ffn", "link", "two", "three"),
    [
        (2.0, 2.0, 0.0, 2.0, 2.0),  # balanced, nothing on the way: two lanes are enough
        (2.0, 2.0, 1.0, 2.0, 2.5),  # the link is a third stage
        (2.0, 2.0, 2.0, 2.0, 3.0),  # three equal stages, one for each lane
        (3.0, 1.0, 0.0, 4 / 3, 4 / 3),  # attention is all that counts
        (2.0, 2.0, 4.0, 2.0, 2.0),  # the link is the bottleneck
    ],
)
def test_ideal_gains(attend, ffn, link, two, three):
    assert ideal_gains(attend, ffn, link) == pytest.approx({2: two, 3: three})
