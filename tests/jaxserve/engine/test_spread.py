"""Which groups compute which tokens of a long prompt, step by step; and when they leave it.

`test_scheduler_simulation.py` has any order of arrivals, cancels, preemptions and lost steps, and
`test_layouts.py` the tokens.
"""

import pytest
import yaml

from tests import golden
from tests.jaxserve.engine.step_plans import make_request, make_scheduler, news, sampled

CASES = yaml.safe_load(golden.text("engine/spread.yaml"))


def make(requests, **limits):
    made = [make_request(str(n), [*range(a, a + b)], c) for n, (a, b, c) in enumerate(requests)]
    return make_scheduler(*made, spread=True, **{"pages": 20, "slots": 2} | limits)


def parts(step):
    rows_of = [[(row.token_ids, row.kv_length) for row in rows] for rows in step.groups]
    assert step.bucket.spread == bool(step.plan.spread)
    return [[part for row in rows for part in row] for rows in rows_of]


@pytest.mark.parametrize("case", CASES)
def test_parts(case):
    limits = dict(CASES[case])
    steps = limits.pop("steps")
    scheduler = make(token_buckets=[1, 2, 4], **limits)
    assert [parts(scheduler.plan(0)) for _ in steps] == steps


@pytest.mark.parametrize("end", ["cancel", "wait"])
def test_copies_leave(end):
    """At the end of the request, and where another one waits for a slot."""
    scheduler = make([(1, 15, 4)], groups=2, slots=1)
    step = scheduler.plan(0)
    assert parts(step) == [[[5, 6, 7, 8], 8], [[1, 2, 3, 4], 4]]
    if end == "cancel":
        scheduler.cancel("0")
    else:
        scheduler.add(make_request("b", [9], 1))
        assert parts(scheduler.plan(0)) == [[[9, 10, 11, 12], 12], []]
    scheduler.complete(step, sampled({}, {}, slots=1))
    scheduler.check_integrity()
    assert (scheduler.kv_usage[0] > 0, scheduler.kv_usage[1]) == (end == "wait", 0.0)


def test_copies_leave_their_pages_in_the_prefix_caches():
    """So a longer prompt begins behind them in both groups."""
    scheduler = make([(1, 8, 1)], groups=2, prefix_cache=True)
    done = scheduler.complete(scheduler.plan(0), sampled({0: 7}, {}, slots=2))
    assert done == [news("0", [7], "length")]
    scheduler.add(make_request("b", [*range(1, 16)], 1))
    assert parts(scheduler.plan(0)) == [[[13, 14, 15], 15], [[9, 10, 11, 12], 12]]
