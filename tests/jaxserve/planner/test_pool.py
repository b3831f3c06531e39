"""The expert pool's policies in simulated time."""

import math

import msgspec
import numpy as np
import pytest

from jaxserve.link.remote.batching import Waiting
from jaxserve.link.remote.cohorts import Cohorts
from jaxserve.planner.pool import ExpertPool, _Workers, simulate_pool

POOL = ExpertPool(workers=60, layers=40, rows=8, fixed=1e-3, row=1e-5 / 60)
LOCKSTEP = math.inf, math.inf


@pytest.mark.parametrize("changes", [{}, {"link": 3e-4, "jitter": 0.15}])
def test_cohorts_form_where_a_pass_a_message_would_take_far_longer_than_an_iteration(changes):
    """180 lanes come one after the other. Passes of one message each would take 180 ms a layer."""
    pool = msgspec.structs.replace(POOL, **changes)
    asked = {"iterations": 4, "warm_up": 4}
    own, lockstep = (
        simulate_pool(pool, Cohorts(pool.workers, *price), **asked) for price in ((), LOCKSTEP)
    )
    assert own.tokens > 0.98 * lockstep.tokens
    assert own.longest < 2.2 * own.p50


def test_cohorts_run_in_parts_where_passes_are_bound_by_rows_and_links_are_slow():
    """A tenth of a pass is fixed: whole cohorts leave a third of the pool's time unused."""
    pool = ExpertPool(workers=15, layers=8, head=1e-4, fixed=27e-6, row=243e-6 / 1920, link=3e-4)
    lockstep, turns, own = (
        simulate_pool(pool, Cohorts(15, *price), domains=domains, iterations=20, warm_up=warm_up)
        for price, domains, warm_up in ((LOCKSTEP, 1, 5), (LOCKSTEP, 3, 5), ((), 1, 30))
    )
    assert turns.tokens > 1.05 * lockstep.tokens
    assert own.tokens > 0.98 * turns.tokens


def test_a_worker_takes_its_answers_in_the_order_of_its_lanes():
    workers = _Workers(POOL, np.random.default_rng(0))
    for lane, at in ((1, 0.0), (2, 3.0), (0, 2.0)):
        workers.answer(Waiting(5, lane, 7, None, lane), at)
    left = [at - 100e-6 for at, _, _ in workers.arrivals]
    assert [message.lane for _, _, message in workers.arrivals] == [0, 1, 2]
    assert 2.0 < left[0] < left[1] < 2.1 < 3.0 < left[2]
