"""Deployments that the bench accepts; the two processes are the bench's own business."""

import argparse
import itertools

import jax.numpy as jnp
import pytest

from jaxserve.bench.stages import bucket_of, decode_plan, measure, run_steps
from jaxserve.config.load import load_deployment
from jaxserve.errors import ConfigError
from jaxserve.roles.layout import Bucket, StepLoad
from jaxserve.roles.worker import Passed

DEMO = load_deployment("demo", {"lanes": 2, "scheduler.slots": 16})
# Buckets of 16 and 64 tokens, of 16 and 64 pages of 16.


def test_a_step_of_a_batch_and_a_context():
    bucket = bucket_of(DEMO, 5, 300)
    assert bucket == Bucket(16, 64)
    plan = decode_plan(DEMO, 1, 7, bucket, 5, 300)
    assert (plan.lane, plan.number) == (1, 7)
    assert plan.load == StepLoad(16, 64, 5, 5, 1500, 1500)
    assert len(set(plan.new_pages[2].tolist())) == 5 * 19  # pages of their own
    assert len(set(plan.token_ids.tolist())) > 1


def test_a_step_that_does_not_fit():
    with pytest.raises(ConfigError, match=r"--contexts 2000: .* scheduler.max_length 1024"):
        bucket_of(DEMO, 4, 2000)


class Driver:
    """Two lanes, in the order in which they begin; notes what it is given."""

    def __init__(self):
        self.begun, self.log = [], []

    @property
    def active(self):
        return bool(self.begun)

    @property
    def idle_lanes(self):
        return [lane for lane in range(2) if lane not in {plan.lane for plan in self.begun}]

    def begin(self, plan):
        self.begun.append(plan)
        self.log.append((plan.lane, plan.number))

    def advance(self):
        self.left = self.begun.pop(0)
        return Passed(jnp.zeros(()))

    def position(self):
        return ("leave", self.left.lane, 5, self.left.number)


def test_every_lane_has_its_steps_in_their_order():
    driver = Driver()
    plans = [decode_plan(DEMO, at % 2, at, Bucket(16, 16), 1, 10) for at in range(6)]
    run_steps(driver, plans)
    assert driver.log == [(0, 0), (1, 1), (0, 2), (1, 3), (0, 4), (1, 5)]


def test_rounds_take_all_points_each_in_an_order_of_its_own():
    """The same in both processes, which would not pair up otherwise."""
    orders = []
    for _ in range(2):
        driver = Driver()
        begun: list[tuple[int, int]] = []

        def begin(plan, driver=driver, begun=begun):
            begun.append((plan.load.sequences, plan.load.context // plan.load.sequences))
            Driver.begin(driver, plan)

        driver.begin = begin
        options = argparse.Namespace(steps=1, batches=[1, 4, 16], contexts=[50, 150])
        measure(DEMO, driver, options, rounds=3)
        orders.append(begun[::2])  # one of two lanes
    assert orders[0] == orders[1]
    rounds = [orders[0][at : at + 6] for at in (0, 6, 12)]
    points = sorted(itertools.product([1, 4, 16], [50, 150]))
    assert [sorted(one) for one in rounds] == [points] * 3
    assert len({tuple(one) for one in rounds}) == 3
