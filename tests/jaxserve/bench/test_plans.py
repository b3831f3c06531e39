"""The bench of plans to followers: what it sends and what it makes of its samples."""

import pytest

from jaxserve.bench import plans
from jaxserve.fleet.control import Boundary, encode


def test_a_plan_is_as_long_as_a_real_one():
    """Five words a row, three a page."""
    found = len(encode(Boundary(0, [plans.plan(0)], "")))
    assert 2048 * 5 * 4 + 16 * 3 * 4 < found < 2048 * 5 * 4 + 16 * 3 * 4 + 400


def test_medians_and_the_limit():
    samples = {"thread": [1.0], "busiest": [2.0], "mean": [3.0], "latency": [4000.0]}
    found = {
        "tree": samples | {"cpu": [10.0, 915.0, 9999.0]},
        "streams": samples | {"cpu": [3660.0]},
    }
    measures = plans.part_of(31, found).measures
    values = [(measure.name.strip(), measure.value, measure.met) for measure in measures]
    assert values[:3] == [
        ("tree: CPU of the leader, a step", 915.0, None),
        ("a follower", pytest.approx(915 / 31), None),
        ("a lane's layer of 61", 15.0, True),
    ]
    assert ("a lane's layer of 61", 60.0, None) in values
    assert plans.part_of(7, found).measures[2].limit is None
