"""Sizing, with simulations whose results are given, and what arithmetic says before them."""

import pytest

from jaxserve.errors import ConfigError
from jaxserve.planner.demand import Demand, Level, Spares
from jaxserve.planner.deploy import Sizer, _fewest
from jaxserve.planner.deploy_fleet import Asked, Chunks
from jaxserve.planner.layouts import Target
from jaxserve.planner.results import FleetResult, Times
from jaxserve.planner.stage_times import Rooflines
from tests.jaxserve.planner.making import H100, calculator, layout, searcher

DEMAND = Demand(rate=200, prompt=512, output=32, spread=0.3, hits=0.25)


class Fleets:
    """Simulates nothing: a TTFT by the number of workers, a TPOT by that of units."""

    def __init__(self, workers: int, units: int):
        self._workers, self._units = workers, units
        self.parts: list[str] = []

    def __call__(self, sizer, part, fleet) -> FleetResult:
        self.parts.append(part if fleet.workers else "together")
        ttft = 0.1 if fleet.workers >= self._workers else 0.9
        tpot = 0.01 if fleet.units >= self._units else 0.09
        return FleetResult(
            seconds=1.0,
            finished=1,
            refused=0,
            tokens_per_second=1.0,
            ttft=Times.of([ttft]),
            tpot=Times.of([tpot]),
            ttft_asked=ttft,
            tpot_asked=tpot,
            waits={},
            busy={},
        )


def sizer(simulate, demand: Demand = DEMAND, ttft: float = 0.2, devices: int = 1) -> Sizer:
    search = searcher("qwen3-30b-a3b", "h100", context=542)
    asked = Asked(
        demand=demand,
        ttft=Level(95.0, ttft),
        tpot=Level(95.0, 0.02),
        positions=40960,
        page=64,
        target=Target(tpot=0.02, max_devices=devices, modes=("tp",)),
        spares=Spares(),
    )
    return Sizer(search, {"h100": H100}, asked, simulate)


def test_as_many_as_the_simulation_asks_for():
    fleets = Fleets(workers=7, units=5)
    made = sizer(fleets).plan().best
    assert (made.fleet.workers, made.fleet.units) == (7, 5)
    assert made.dollars == pytest.approx((7 + 5) * H100.price)
    assert fleets.parts[-1] == "whole"


def test_light_loads_get_one_colocated_worker():
    """Apart they take two; at 200 requests a second one is not even simulated."""
    light = Demand(rate=0.2, prompt=512, output=32)
    made = sizer(Fleets(workers=0, units=1), light).plan().best
    assert (made.fleet.workers, made.fleet.units) == (0, 1)
    assert [role.name for role in made.roles] == ["decode"]
    assert made.dollars == H100.price
    slow = sizer(Fleets(workers=1, units=1), light).plan()
    assert (slow.best.fleet.workers, slow.best.fleet.units) == (1, 1)
    assert any("TTFT p95 0.9 s" in reason for reason in slow.reasons.values())
    busy = Fleets(workers=0, units=1)
    assert sizer(busy).plan().best.fleet.workers > 0
    assert "together" not in busy.parts


def test_no_fewer_than_the_work_takes():
    """However short the simulated waits: 85 % of the time, and of the slots."""
    plan = sizer(Fleets(1, 1), Demand(rate=2000, prompt=512, output=32)).plan()
    fleet = plan.best.fleet
    assert fleet.workers >= 2000 / (0.85 * fleet.worker.capacity)
    assert fleet.units >= 2000 / fleet.unit.capacity


def test_hand_offs_keep_neither_end_of_the_pages_link_busier():
    """50 MB each: 2,000 a second take several ends, whatever the simulation says."""
    found = sizer(Fleets(1, 1), Demand(rate=4000, prompt=1024, output=8)).plan().best
    busy = 4000 * found.link.seconds(1024)
    assert busy > 3
    assert min(found.fleet.workers, found.fleet.units) >= busy / 0.85


@pytest.mark.parametrize("field", ["rate", "prompt", "output"])
def test_one_percent_more_is_no_jump(field):
    """Bounds of workers and units before they are rounded up."""

    def least(factor: float) -> tuple[float, float]:
        sizes = {"rate": 200.0, "prompt": 5000, "output": 500}
        sizes[field] = type(sizes[field])(sizes[field] * factor)
        one = sizer(Fleets(1, 1), Demand(**sizes, spread=0.5))
        fleet = one.plan().best.fleet
        return one.asked.demand.rate / fleet.worker.capacity, sizes["rate"] / fleet.unit.capacity

    before, after = least(1.0), least(1.01)
    for few, more in zip(before, after, strict=True):
        assert 1.0 <= more / few <= 1.03


def test_nothing_meets_it():
    with pytest.raises(ConfigError, match="no prefill worker of up to 1 devices meets p95=1ms"):
        sizer(Fleets(1, 1), ttft=1e-3).plan()
    with pytest.raises(ConfigError, match=r"whole fleet: .* units: TTFT .* TPOT p95 90 ms"):
        sizer(Fleets(1, 10**6)).plan()


def test_fewer_slots_take_more_units():
    one = sizer(Fleets(1, 1))
    made = one.plan().best
    few = one.again(made, 20)
    assert few.fleet.unit.slots == 20
    assert few.fleet.units > made.fleet.units


def test_the_fewest():
    asked: list[int] = []

    def meets(number: int) -> bool:
        asked.append(number)
        return number >= 11

    assert _fewest(meets, 3) == 11
    assert len(asked) <= 8
    assert _fewest(lambda number: False, 3) is None
    assert [_fewest(meets, 3, most) for most in (10, 11, 30)] == [None, 11, 11]


def chunks(chunk: int, dp: int = 1) -> Chunks:
    own, made = calculator("qwen3-32b"), layout("ep" if dp > 1 else "tp", "h100", dp=dp)
    return Chunks(made, Rooflines(made, own, own, (H100, H100)), chunk)


def test_prompts():
    """Bound by compute: 2 x 31.2 billion parameters a token at 70 % of the peak, and attention."""
    least = 2 * 31.2e9 * 4096 / (989e12 * 0.7)
    assert least < chunks(1024).alone(4096, 0) < 1.5 * least
    # Found tokens are not computed, but attended to.
    half = chunks(1024).alone(4096, 2048)
    assert 0.5 < half / chunks(1024).alone(4096, 0) < 0.6
    short, long = chunks(2048).alone(8192, 0), chunks(2048).alone(32768, 0)
    assert long > 4.4 * short
    equal = Demand(rate=1, prompt=16384, output=1).requests(10**6, 64)
    spread = Demand(rate=1, prompt=16384, output=1, spread=1.0).requests(10**6, 64)
    assert chunks(2048).busy(spread) > 1.05 * chunks(2048).busy(equal)
