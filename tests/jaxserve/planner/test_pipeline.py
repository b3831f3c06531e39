"""One plan has the same TPOT in the search, in the sizing of a deployment and in simulated time."""

import msgspec
import pytest

from jaxserve.planner.assumptions import Assumptions
from jaxserve.planner.deploy_decode import Pace
from jaxserve.planner.deploy_demand import Demand
from jaxserve.planner.noise import Lengths
from jaxserve.planner.simulate import Conditions, Simulation, Traffic
from jaxserve.planner.stage_times import Rooflines
from tests.jaxserve.planner.making import H800, layout, searcher
from tests.jaxserve.planner.test_simulate import deployment

OVERLAPPED = Assumptions(overlapped=True, whole_dense=True)


@pytest.mark.parametrize(
    ("mode", "lanes", "assumed", "apart"),
    [
        ("ep", 2, OVERLAPPED, 0.03),
        ("ep", 2, Assumptions(), 0.03),
        ("ep", 1, Assumptions(), 0.03),
        # The search has both directions of the link in one stage, and hides no lane's head.
        ("afd", 3, Assumptions(host_seconds=0.0, host_device_seconds=0.0), 0.07),
    ],
)
def test_one_plan_three_ways(mode, lanes, assumed, apart):
    """16 DP groups of 8 sequences of 4,064 tokens, all alike but for their outputs."""
    plan = layout(mode, dp=16, ep=16, lanes=lanes)
    search = searcher("deepseek-v3", context=4064, assumed=assumed)
    searched = search.evaluate(plan, 8).tpot
    requests = Demand(rate=1, prompt=4032, output=64).requests(8192, 64)
    pace = Pace(search, search.calculator, plan, (H800, H800)).seconds(requests, 8)
    made = deployment(16, lanes, 8, "afd" if mode == "afd" else "colocated", pages=4096)
    limits = msgspec.structs.replace(made.scheduler, max_length=8192, page_buckets=[512])
    made = msgspec.structs.replace(made, scheduler=limits)
    traffic = Traffic(lengths=Lengths(prompt=4032, output=64, longest=8192))
    times = Rooflines(plan, search.calculator, search.calculator, (H800, H800))
    conditions = Conditions(steps=12, warm_up=4)
    result = Simulation(made, times, traffic, conditions).run()[0]
    assert pace == pytest.approx(searched, rel=apart)
    assert result.tpot.mean == pytest.approx(searched, rel=apart)


def test_two_lanes_are_faster_where_they_overlap():
    two = layout("ep", dp=16, lanes=2)
    assert two.overlapped(OVERLAPPED)
    assert not two.overlapped(Assumptions())
    assert not msgspec.structs.replace(two, lanes=1).overlapped(OVERLAPPED)
    assert not msgspec.structs.replace(two, mode="tp").overlapped(OVERLAPPED)
