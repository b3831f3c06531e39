"""Sizes a whole deployment: prefill workers, the pages link, decode units and spares, for requests
at a rate and their TTFT and TPOT. Called by `fleet/deploy_command.py`.

The decode units are the layouts that `search.py` finds, with what an arriving request takes of them
by Little's law; prefill workers are colocated layouts of their own. Of both the cheapest fleet is
taken. Plain arithmetic; no JAX.
"""

from collections.abc import Iterator, Mapping
from statistics import NormalDist
from typing import NamedTuple

import msgspec
import numpy as np

from jaxserve.config.topology import PlannedMode
from jaxserve.errors import ConfigError
from jaxserve.planner.deploy_demand import Demand, Level, Requests, Spares
from jaxserve.planner.deploy_fleet import (
    CHUNKS,
    DecodeUnit,
    Fleet,
    Handoff,
    Overloaded,
    Pace,
    Prediction,
    PrefillWorker,
    Steps,
    after_prefill,
    capacity,
    occupied,
    predict,
    steps_of,
    units_for,
    workers_for,
)
from jaxserve.planner.hardware import MONTH, Hardware
from jaxserve.planner.layouts import Layout, Layouts, Target
from jaxserve.planner.memory import Memory
from jaxserve.planner.models import CostModel
from jaxserve.planner.noise import ExpertLoads
from jaxserve.planner.search import Found, Plan, Searcher

TRIED = 3
"""Layouts of a mode that are looked at closely."""
KEPT = 0.25
"""Least part of a prefill worker's memory that is left for pages."""


class Hosts(NamedTuple):
    """Hardware by name that the parts may use."""

    prefill: Mapping[str, Hardware]
    attention: Mapping[str, Hardware]
    ffn: Mapping[str, Hardware]


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """Demand and targets of the deployment, and what may be rented.

    Attributes:
      positions: the model's.
      prefill_devices, decode_devices: of a worker and of a unit: these alone are tried; 0: all.
    """

    demand: Demand
    ttft: Level
    tpot: Level
    positions: int
    page: int
    target: Target
    spares: Spares
    pages_latency: float = 2e-3
    prefill_devices: int = 0
    decode_devices: int = 0

    @property
    def longest(self) -> int:
        """Tokens of a sequence, at most."""
        return min(self.positions, self.demand.longest(self.page))

    @property
    def text(self) -> str:
        """The demand and its targets in a few words."""
        demand = self.demand
        return (
            f"{demand.rate:g} requests a second, {demand.prompt:,} tokens in ({demand.hits:.1%} in "
            f"a prefix cache), {demand.output:,} out; TTFT {self.ttft.text}, TPOT {self.tpot.text}"
        )

    @property
    def percents(self) -> tuple[float, float]:
        """Percentiles of TTFT and TPOT that are asked for."""
        return self.ttft.percent, self.tpot.percent


class Role(NamedTuple):
    """Devices that one role rents."""

    name: str
    hardware: Hardware
    devices: int
    spare_hosts: int

    @property
    def chips(self) -> float:
        """Accelerators as they are sold, with spares."""
        spare = self.spare_hosts * self.hardware.devices_per_host
        return (self.devices + spare) / self.hardware.jax_devices

    @property
    def dollars(self) -> float:
        """USD an hour."""
        return self.chips * self.hardware.price * self.hardware.jax_devices


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """A plan for a whole deployment."""

    fleet: Fleet
    link: Handoff
    prediction: Prediction
    roles: tuple[Role, ...]
    plan: Plan
    """The search's plan of a decode unit."""

    @property
    def dollars(self) -> float:
        """USD an hour."""
        return sum(role.dollars for role in self.roles)

    @property
    def month(self) -> float:
        """USD a month."""
        return self.dollars * MONTH

    @property
    def peak_slots(self) -> int:
        """Sequences of a DP group and lane that run in all but one moment of a thousand."""
        unit, units = self.fleet.unit, self.fleet.units
        peak = occupied(self.prediction.sequences, 99.9)
        lanes = units * unit.layout.dp * unit.layout.lanes
        # Whole requests go to DP groups: the fullest of them has one more than its share.
        return max(1, min(unit.slots, int(peak / lanes) + 2))

    def millions(self, requests: Requests, rate: float) -> tuple[float, float]:
        """USD a million tokens of prompts, found ones included, which prefill costs; and of
        outputs, which decoding costs."""
        prefill = sum(role.dollars for role in self.roles if role.name == "prefill")
        hourly = prefill, self.dollars - prefill
        tokens = requests.prompt, requests.output
        found = (
            dollars / 3600 / (rate * float(each.mean())) * 1e6
            for dollars, each in zip(hourly, tokens, strict=True)
        )
        return next(found), next(found)


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """The best deployment, and the best of other kinds."""

    best: Deployment
    others: tuple[Deployment, ...]
    found: Found
    """Results of the search for decode units."""


class Sizer:
    """One model on some hardware.

    Args:
      searcher: finds decode units, at the demand's mean context.
      hosts: what may be rented.
    """

    def __init__(self, searcher: Searcher, hosts: Hosts, asked: Asked):
        self._calculator, self.searcher, self._hosts = searcher.calculator, searcher, hosts
        self.asked = asked
        self._requests: dict[Demand, Requests] = {}
        self._steps: dict[tuple[Layout, int, Demand], Steps] = {}
        self._loads: dict[object, ExpertLoads] = {}

    @property
    def context(self) -> int:
        """Mean tokens of a running sequence, for which the search looked."""
        return self.searcher.calculator.context

    @property
    def model(self) -> CostModel:
        """The model to serve."""
        return self._calculator.model

    def requests(self, demand: Demand) -> Requests:
        """Requests of a demand, as the deployment cuts them."""
        if demand not in self._requests:
            self._requests[demand] = demand.requests(self.asked.longest, self.asked.page)
        return self._requests[demand]

    def plan(self) -> Planned:
        """The cheapest deployment.

        Raises:
          ConfigError: nothing meets the targets; says which part cannot.
        """
        asked, demand = self.asked, self.asked.demand
        requests = self.requests(demand)
        found = self.searcher.search(asked.target)
        candidates = [
            plan for plan in found.plans if asked.decode_devices in (0, plan.layout.devices)
        ]
        if not candidates:
            raise NoUnitError(found)
        made: dict[PlannedMode, Deployment] = {}
        refused: list[str] = []
        workers = list(self._workers(requests))
        if not workers:
            raise ConfigError(self._no_worker())
        for plan in self._closest(candidates, requests, demand.rate):
            unit = self.unit(plan, requests)
            if isinstance(unit, str):
                refused.append(unit)
                continue
            one = self._cheapest(plan, unit, workers)
            if isinstance(one, str):
                refused.append(one)
                continue
            mode = plan.layout.mode
            if mode not in made or _price(one) < _price(made[mode]):
                made[mode] = one
        if not made:
            raise ConfigError("no deployment meets it: " + "; ".join(dict.fromkeys(refused)))
        best, *others = sorted(made.values(), key=_price)
        return Planned(best=best, others=tuple(others), found=found)

    def _closest(self, plans: list[Plan], requests: Requests, rate: float) -> Iterator[Plan]:
        """The layouts of every mode that are cheapest for the rate, by the search's figures."""

        def dollars(plan: Plan) -> float:
            sequences = rate * float(requests.output.mean()) * plan.tpot
            peak = sequences + NormalDist().inv_cdf(0.999) * sequences**0.5
            units = -(-peak // plan.sequences)
            return float(units * plan.dollars * plan.tokens_per_second)

        left: dict[PlannedMode, int] = {}
        for plan in sorted(plans, key=lambda plan: (dollars(plan), plan.layout.devices)):
            mode = plan.layout.mode
            left[mode] = left.get(mode, TRIED) - 1
            if left[mode] >= 0:
                yield plan

    def unit(self, plan: Plan, requests: Requests) -> DecodeUnit | str:
        """Returns a decode unit of the plan's layout, or why it is none."""
        layout, target = plan.layout, self.asked.tpot.seconds
        hardware = self._hosts.attention[layout.attention], self._hosts.ffn[layout.ffn]
        pace = Pace(self.searcher, layout, hardware, self._experts(layout))
        slots = pace.largest(requests, self._room(plan, requests), target)
        if not slots:
            return (
                f"with sequences of unequal lengths not even one a DP group is within "
                f"{target * 1e3:g} ms in {layout.devices} devices ({layout.mode})"
            )
        table = pace.table(requests, slots)
        return DecodeUnit(layout, slots, hardware, table, plan.tokens_a_step)

    def _room(self, plan: Plan, requests: Requests) -> int:
        """Slots whose sequences fit with their unequal lengths, twice the standard deviation of
        their sum above the mean."""
        count = plan.batch * plan.layout.lanes
        more = 2 * requests.context_spread / (requests.context * count**0.5)
        return max(1, int(plan.batch / (1 + more)))

    def _experts(self, layout: Layout) -> ExpertLoads | None:
        moe = self._calculator.model.moe
        if self.searcher.skew is None or moe is None or layout.ep == 1:
            return None
        sizes = layout.slots(moe.experts)
        if sizes not in self._loads:
            random = np.random.default_rng(0)
            rows = self.searcher.skew.popularity(random, self._calculator.model.layers, moe.experts)
            self._loads[sizes] = ExpertLoads(random, rows, sizes, top_k=moe.top_k, placed=True)
        return self._loads[sizes]

    def _workers(self, requests: Requests) -> Iterator[PrefillWorker]:
        """Prefill workers that hold the weights, and pages beside them."""
        asked, calculator, hosts = self.asked, self._calculator, self._hosts.prefill
        modes: tuple[PlannedMode, ...] = ("ep", "tp")
        target = msgspec.structs.replace(asked.target, modes=modes, most_drafts=0)
        layouts = Layouts(calculator.model, hosts, hosts, skewed=self.searcher.skew is not None)
        for layout in layouts.of(target):
            if asked.prefill_devices not in (0, layout.devices) or layout.shared_ranks:
                continue
            hardware = hosts[layout.attention]
            weights = calculator.attention_weights(layout.tp)
            weights += calculator.ffn_weights(layout.ffn_mesh, hardware, layout.redundant_slots)
            if weights > hardware.memory * (1 - calculator.assumed.reserve - KEPT):
                continue
            for chunk in CHUNKS:
                worker = PrefillWorker(layout, chunk, hardware)
                useful = chunk == CHUNKS[0] or chunk < 2 * requests.computed.mean()
                if useful and self._holds(worker):
                    yield worker

    def _holds(self, worker: PrefillWorker) -> bool:
        """Whether a step of full chunks fits beside the weights and the pages of one prompt."""
        memory = Memory(self._calculator, self._hosts.prefill, self._hosts.prefill)
        (held,) = memory.held(worker.layout, 1, worker.chunk)
        longest = held._replace(cache=held.cache * self.asked.longest / self.context)
        return longest.fits(worker.hardware, self._calculator.assumed.reserve)

    def _no_worker(self) -> str:
        names = ", ".join(self._hosts.prefill)
        most = self.asked.prefill_devices or f"up to {self.asked.target.max_devices}"
        return f"no prefill worker: the weights do not fit on {most} devices of {names}"

    def steps(self, worker: PrefillWorker, demand: Demand) -> Steps:
        """Steps of a prefill worker with the demand's prompts."""
        key = worker.layout, worker.chunk, demand
        if key not in self._steps:
            experts = self._experts(worker.layout)
            self._steps[key] = steps_of(worker, self._calculator, self.requests(demand), experts)
        return self._steps[key]

    def _cheapest(
        self, plan: Plan, unit: DecodeUnit, workers: list[PrefillWorker]
    ) -> Deployment | str:
        """Returns the deployment with this unit and the prefill workers that cost least, or why
        there is none."""
        asked, demand = self.asked, self.asked.demand
        units = units_for(unit, self.requests(demand), demand.rate, asked.tpot)
        if units is None:
            return f"no number of units meets {asked.tpot.text}"
        made = [self.size(plan, unit, units, worker, demand) for worker in workers]
        return min(filter(None, made), key=_price, default=None) or (
            f"no prefill worker of up to {asked.target.max_devices} devices meets {asked.ttft.text}"
        )

    def size(
        self, plan: Plan, unit: DecodeUnit, units: int, worker: PrefillWorker, demand: Demand
    ) -> Deployment | None:
        """The fewest of these prefill workers; None: no number of them meets the TTFT."""
        asked, requests = self.asked, self.requests(demand)
        steps, link = self.steps(worker, demand), self.link(worker, unit)
        fewest = max(
            1, int(demand.rate * requests.prompt.mean() / capacity(worker, steps, requests))
        )
        after = after_prefill(unit, units, fewest, link, requests, demand.rate)
        if isinstance(after, Overloaded):
            return None
        rest = sum(after[1].values(), np.zeros(len(requests.prompt)))
        count = workers_for(worker, steps, rest, requests, demand.rate, asked.ttft)
        if count is None:
            return None
        fleet = Fleet(worker, steps, count, unit, units)
        found = predict(fleet, link, requests, demand.rate, asked.percents)
        if isinstance(found, Overloaded):
            return None
        roles = self._roles(fleet)
        return Deployment(fleet=fleet, link=link, prediction=found, roles=roles, plan=plan)

    def link(self, worker: PrefillWorker, unit: DecodeUnit) -> Handoff:
        """The pages link between them, at the network of the slower."""
        ends = (
            worker.hardware.network * worker.layout.devices,
            unit.hardware[0].network * unit.layout.attention_devices,
        )
        return Handoff(
            token_bytes=self._calculator.handed_over,
            bytes_per_second=min(ends),
            latency=self.asked.pages_latency,
            page=self.asked.page,
        )

    def _roles(self, fleet: Fleet) -> tuple[Role, ...]:
        spares, layout = self.asked.spares, fleet.unit.layout
        a, f = fleet.unit.hardware
        parts = [
            ("prefill", fleet.worker.hardware, fleet.workers * fleet.worker.layout.devices),
            ("attention", a, fleet.units * layout.attention_devices),
            ("ffn", f, fleet.units * layout.ffn_devices),
        ]
        if layout.topology.has("colocated"):
            parts = [parts[0], ("decode", *parts[1][1:])]
        return tuple(
            Role(name, hardware, devices, spares.hosts(-(-devices // hardware.devices_per_host)))
            for name, hardware, devices in parts
        )

    def under(self, made: Deployment, demand: Demand) -> Prediction | Overloaded:
        """Returns what the same fleet does with another demand."""
        fleet, requests = self._as_with(made, demand), self.requests(demand)
        return predict(fleet, made.link, requests, demand.rate, self.asked.percents)

    def again(self, made: Deployment, demand: Demand) -> Deployment | None:
        """Returns a deployment of the same workers and units for another demand; None: no number of
        them meets the targets."""
        unit = self._as_with(made, demand).unit
        if unit.pace[0][1] > self.asked.tpot.seconds:
            return None
        return self._resized(made, unit, demand)

    def _resized(self, made: Deployment, unit: DecodeUnit, demand: Demand) -> Deployment | None:
        units = units_for(unit, self.requests(demand), demand.rate, self.asked.tpot)
        if units is None:
            return None
        return self.size(made.plan, unit, units, made.fleet.worker, demand)

    def with_slots(self, made: Deployment, slots: int) -> Deployment:
        """Returns the same workers and units, as many as it takes where a unit has no more slots.

        Raises:
          ConfigError: no number of them meets the targets.
        """
        unit = made.fleet.unit._replace(slots=slots)
        again = self._resized(made, unit, self.asked.demand)
        if again is None:
            raise ConfigError(f"with {slots} sequences a DP group and lane the targets are missed")
        return again

    def _as_with(self, made: Deployment, demand: Demand) -> Fleet:
        """The fleet with its times for other requests; a unit's pages hold fewer longer ones."""
        fleet, requests = made.fleet, self.requests(demand)
        own = self.requests(self.asked.demand)
        steps = self.steps(fleet.worker, demand)
        if requests.context == own.context:
            return fleet._replace(steps=steps)
        unit, layout = fleet.unit, fleet.unit.layout
        pace = Pace(self.searcher, layout, unit.hardware, self._experts(layout))
        slots = max(1, int(unit.slots * own.context / requests.context))
        table = pace.table(requests, slots)
        return fleet._replace(steps=steps, unit=unit._replace(slots=slots, pace=table))


class NoUnitError(ConfigError):
    """No decode unit meets the TPOT; carries what the search found."""

    def __init__(self, found: Found):
        super().__init__("no decode unit meets the TPOT")
        self.found = found


def _price(made: Deployment) -> tuple[float, float]:
    return made.dollars, made.prediction.ttft_asked
