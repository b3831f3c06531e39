"""A fleet's predictions: Little's law by hand, and against the fleet in simulated time."""

import pytest

from jaxserve.planner.deploy_decode import DecodeUnit
from jaxserve.planner.deploy_demand import Demand
from jaxserve.planner.deploy_fleet import (
    Fleet,
    Handoff,
    Overloaded,
    decoding,
    occupied,
    predict,
    units_for,
    workers_for,
)
from jaxserve.planner.deploy_prefill import PrefillWorker, Steps
from tests.jaxserve.planner.making import H100, layout

LAYOUT = layout("ep", "h100", dp=2)
UNIT = DecodeUnit(LAYOUT, 50, (H100, H100), ((1.0, 0.02), (50.0, 0.04)))
WORKER = PrefillWorker(LAYOUT, 1000, H100)
STEPS = Steps(0.1, 0.1)
LINK = Handoff(token_bytes=1e5, bytes_per_second=1e9, latency=0.01, page=64)
REQUESTS = Demand(rate=5, prompt=1000, output=100).requests(2000, 64)


def test_littles_law():
    found = decoding(UNIT, 1, REQUESTS, 5.0)
    assert found.sequences == pytest.approx(5 * 100 * found.tpot)
    # Of s sequences, s / 2 a group: 0.02 + (s / 2 − 1) 0.02 / 49 = s / 500
    assert found.sequences == pytest.approx((0.02 - 0.02 / 49) / (1 / 500 - 0.01 / 49), rel=1e-3)


def test_more_than_the_slots():
    assert decoding(UNIT, 1, REQUESTS, 30.0) is None


def test_paces():
    assert UNIT.tpot(0) == 0.02
    assert UNIT.tpot(100) == 0.04
    assert UNIT.tpot(200) == pytest.approx(0.04 + 50 * 0.02 / 49)
    assert UNIT.sequences == 100
    assert UNIT.dollars == pytest.approx(2 * H100.price)


def test_as_many_units_as_it_takes():
    units = units_for(UNIT, REQUESTS, 200.0, 95.0, 0.03)
    for count, meets in ((units, True), (units - 1, False)):
        found = decoding(UNIT, count, REQUESTS, 200.0)
        fits = found is not None and UNIT.tpot(occupied(found.sequences, 95) / count) <= 0.03
        assert fits == meets
    assert units_for(UNIT, REQUESTS, 200.0, 95.0, 0.01) is None


def test_a_request_that_waits_for_nobody():
    fleet = Fleet(WORKER, STEPS, 4, UNIT, 1)
    found = predict(fleet, LINK, REQUESTS, 0.01)
    crossing = 0.01 + 15 * 64 * 1e5 / 1e9
    assert found.parts["prefill"].p50 == pytest.approx(0.1, rel=0.01)
    assert found.parts["pages"].p50 == pytest.approx(crossing)
    assert 2 * 0.02 < found.parts["decode"].p50 < 3 * 0.02
    assert found.ttft.p50 == pytest.approx(0.1 + crossing + 2.5 * 0.02, rel=0.02)
    assert found.tpot.p50 == pytest.approx(0.02, rel=0.01)
    assert found.link_bytes == pytest.approx(0.01 * 960 * 1e5)


def test_what_is_short_is_named():
    fleet = Fleet(WORKER, STEPS, 1, UNIT, 1)
    slow = fleet._replace(units=9, steps=Steps(1.0, 1.0))
    narrow = Handoff(token_bytes=1e5, bytes_per_second=1e8, latency=0.01, page=64)
    for made, link, rate, reason in (
        (fleet, LINK, 30.0, "1 x 100 slots"),
        (fleet, narrow, 2.0, "the pages link"),
        (slow, LINK, 3.0, "1 prefill workers"),
    ):
        found = predict(made, link, REQUESTS, rate)
        assert isinstance(found, Overloaded)
        assert reason in found.reason


def test_workers_for_a_percentile():
    rest = REQUESTS.prompt * 0.0
    few = workers_for(WORKER, STEPS, rest, REQUESTS, 100.0, 50.0, 0.26)
    many = workers_for(WORKER, STEPS, rest, REQUESTS, 100.0, 99.0, 0.26)
    # Two groups a worker, a chunk in 0.1 s: at least 5 workers.
    assert 5 <= few < many
    assert workers_for(WORKER, STEPS, rest, REQUESTS, 100.0, 95.0, 0.05) is None
