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


# Attention that varies by 15 %; a worker that dies for 0.3 s while its cohort is tried in parts.
VARIES = {"lanes": 2, "layers": 4, "fixed": 1e-4, "link": 2e-5, "jitter": 0.15, "head": 1e-4}
DIES = {"lanes": 2, "layers": 16, "workers": 8, "fixed": 25e-6, "rows": 96, "row": 3e-7}
DIES["dead"] = 0.5, 0.8


@pytest.mark.parametrize(("changes", "steps"), [({}, 4), (VARIES, 15), (DIES, 40)])
def test_cohorts_form_and_nobody_is_left_behind_where_lockstep_waits_for_calm_workers(
    changes, steps
):
    """180 lanes come one after the other. Passes of one message each would take 180 ms a layer."""
    pool = msgspec.structs.replace(POOL, **changes)
    own, lockstep = (
        simulate_pool(pool, Cohorts(pool.workers, *price), seed=1, iterations=steps, warm_up=steps)
        for price in ((), LOCKSTEP)
    )
    assert own.tokens > 0.98 * lockstep.tokens
    assert own.longest < 1.5 * own.p50


def test_cohorts_run_in_parts_where_passes_are_bound_by_rows_and_links_are_slow():
    """Where a tenth of a pass is fixed. If a worker's lanes ran in a row, it would be 0.993."""
    pool = ExpertPool(workers=15, layers=8, head=1e-4, fixed=27e-6, row=243e-6 / 1920, link=3e-4)
    lockstep, turns, own = (
        simulate_pool(pool, Cohorts(15, *price), domains=domains, iterations=20, warm_up=warm_up)
        for price, domains, warm_up in ((LOCKSTEP, 1, 5), (LOCKSTEP, 3, 5), ((), 1, 30))
    )
    assert turns.tokens > 1.05 * lockstep.tokens
    assert own.tokens > 1.005 * turns.tokens


@pytest.mark.parametrize("seed", [1, 4])
def test_a_worker_that_is_stopped_half_of_the_time_costs_the_others_nothing(seed):
    """Had they the same patience each time, they would be at 0.8."""
    stages = {"fixed": 6e-3, "row": 5e-4, "attend": (8e-3, 0.0, 0.0), "head": 0.0}
    pool = ExpertPool(workers=3, lanes=2, layers=16, rows=1, **stages)
    own, calm = (
        simulate_pool(each, Cohorts(3), seed=seed, iterations=40)
        for each in (msgspec.structs.replace(pool, duty=0.5), pool)
    )
    assert own.tokens > 0.95 * calm.tokens


def test_a_worker_takes_its_answers_in_the_order_of_its_lanes():
    workers = _Workers(POOL, np.random.default_rng(0))
    for lane, at in ((1, 0.0), (2, 3.0), (0, 2.0)):
        workers.answer(Waiting(5, lane, 7, None, lane), at)
    left = [at - 100e-6 for at, _, _ in workers.arrivals]
    assert [message.lane for _, _, message in workers.arrivals] == [0, 1, 2]
    assert 2.0 < left[0] < left[1] < 2.1 < 3.0 < left[2]
