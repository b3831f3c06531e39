"""Sizes a whole deployment: prefill workers, the pages link, decode units and spares, for requests
at a rate and their TTFT and TPOT. Called by `fleet/deploy_command.py`.

Arithmetic gives every layout the most requests a second that it could serve, and so what it costs
at least. The cheapest decode layout is taken. From the cheapest prefill workers on, a simulation
with the engine's own schedulers and the router's own policy (`fleet/deploy_command.py`) says how
many it takes; those that cost more at least than the best ones are not simulated. A simulation of
the whole fleet says how many more of both it takes. Where one unit that computes prompts, too,
meets the targets for less, that is the plan. No queue is approximated.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from jaxserve.config.topology import PlannedMode
from jaxserve.errors import ConfigError
from jaxserve.model.ffn.placement import SlotSizes
from jaxserve.planner.deploy_fleet import (
    HELD_SLOTS,
    UNIT_CHUNK,
    Asked,
    Chunks,
    DecodeUnit,
    DeployedPart,
    Fleet,
    FleetPlan,
    Handoff,
    Planned,
    PrefillWorker,
    Role,
)
from jaxserve.planner.hardware import Hardware
from jaxserve.planner.layouts import Layout, Layouts
from jaxserve.planner.memory import Memory
from jaxserve.planner.noise import ExpertLoads
from jaxserve.planner.results import FleetResult
from jaxserve.planner.search import Pace, Plan, Searcher, why_not
from jaxserve.planner.stage_times import Rooflines, expert_loads

TRIED = 3
"""Decode layouts of a mode that are looked at closely."""
SIMULATED = 16
"""Kinds of prefill workers that are simulated at most; one that costs more takes two runs."""
MOST_BUSY = 0.85
"""Most of the time, and of the slots, that is planned to be taken: nearer to 1 waits multiply."""
CHUNKS = (1024, 2048, 4096, 8192)
"""Tokens of a DP group's prefill step to try."""
REASONS = 16
"""Layouts that are named with what they cost."""
FURTHER = 4
"""Multiple of the least number of workers or units up to which larger ones are tried."""
GROWN, PART = 12, 33
"""Times that a fleet that misses a target gets more workers or units: 3 % more, or one."""


class Sizer:
    """One model on some hardware. The searcher finds decode units, at the demand's mean context;
    prefill workers may use the hardware in `prefill`; `simulate` runs a fleet in simulated time."""

    def __init__(
        self,
        searcher: Searcher,
        prefill: Mapping[str, Hardware],
        asked: Asked,
        simulate: "Simulate",
    ):
        self._calculator, self.searcher, self._prefill = searcher.calculator, searcher, prefill
        self.asked, self._simulate = asked, simulate
        self.model, self.context = searcher.calculator.model, searcher.calculator.context
        self.demand = asked.demand
        self.requests = self.demand.requests(asked.longest, asked.page)
        """Requests of the demand, as the deployment cuts them."""
        self._loads: dict[SlotSizes, ExpertLoads | None] = {}
        self._reasons: dict[str, str] = {}

    def plan(self) -> Planned:
        """Returns the cheapest deployment; raises ConfigError, saying which part cannot be."""
        asked = self.asked
        found = self.searcher.search(asked.target)
        candidates = [
            plan for plan in found.plans if asked.decode_devices in (0, plan.layout.devices)
        ]
        if not candidates:
            raise ConfigError(why_not(self.searcher, asked.target, found))
        workers = sorted(
            self._workers(), key=lambda w: (w.dollars * self._least_workers(w), w.alone)
        )
        if not workers:
            most = asked.prefill_devices or f"up to {asked.target.max_devices}"
            raise ConfigError(
                f"no prefill worker: the weights do not fit on {most} devices of "
                f"{', '.join(self._prefill)}"
            )
        fast = [worker for worker in workers if worker.alone <= asked.ttft.seconds]
        if not fast:
            raise ConfigError(
                f"no prefill worker of up to {asked.target.max_devices} devices meets "
                f"{asked.ttft.text}: the fastest takes {min(w.alone for w in workers):.2g} s for "
                "such a prompt with nothing else to do"
            )
        if slow := len(workers) - len(fast):
            told = f"a prompt by itself takes more than {asked.ttft.seconds:g} s"
            self._reasons[f"prefill: {slow} other kinds"] = told
        units = sorted(self._units(candidates), key=lambda u: u.dollars * self._least_units(u))
        if not units:
            raise ConfigError(self._unmet())
        for unit in units:
            number, told = self._least_units(unit), "" if unit is units[0] else "at least "
            reason = f"{told}{number}, {number * unit.dollars:,.2f} USD an hour"
            self._reasons[f"decode: {unit.layout.text}"] = reason
        fewest = (self._fewest_units(units[0], w, self._least_workers(w)) for w in fast)
        fleet = self._cheapest(map(self._linked, fewest))
        best = None if fleet is None else self._whole(fleet)
        for unit in () if asked.prefill_devices else units:
            computes = unit.layout.topology.has("colocated") and not unit.layout.drafts
            if computes and (best is None or unit.dollars < best.dollars):
                best = self._together(Fleet(fast[0], 0, unit, 1, 1.0)) or best
        if best is None:
            raise ConfigError(self._unmet())
        return Planned(best=best, found=found, reasons=self._reasons)

    def _cheapest(self, fleets: Iterable[Fleet]) -> Fleet | None:
        """Returns the fleet with the cheapest prefill workers; None: no number of any kind meets
        the TTFT. `fleets` has the fewest of each kind that could, cheapest first."""
        best: Fleet | None = None
        left = SIMULATED
        for least in fleets:
            paid = 0.0 if best is None else best.prefill_dollars
            if not left or (best is not None and least.prefill_dollars >= paid):
                reason = f"at least {least.prefill_dollars:,.2f} USD an hour"
            else:
                left -= 1
                most = 0 if best is None else _ceil(paid / least.worker.dollars) - 1
                sized, reason = self._sized(least, most), f"not below {paid:,.2f} USD an hour"
                if sized is not None:
                    best = sized
                    reason = f"{sized.workers}, {sized.prefill_dollars:,.2f} USD an hour"
                elif best is None:
                    reason = f"no number of them meets {self.asked.ttft.text}"
            if len(self._reasons) < REASONS:
                self._reasons[f"prefill: {least.worker.text}"] = reason
        return best

    def _unmet(self) -> str:
        told = "; ".join(f"{name}: {reason}" for name, reason in self._reasons.items())
        return f"no deployment meets it: {told}"

    def _together(self, fleet: Fleet) -> FleetPlan | None:
        """A colocated unit's deployment that also computes prompts; None: it misses a target."""
        rate = self.demand.rate
        name, unit = f"prefill and decode: {fleet.unit.layout.text}", fleet.unit
        busy = self._chunks(unit.layout, unit.hardware, UNIT_CHUNK).busy(self.requests)
        prompts = rate * busy / unit.layout.dp
        self._reasons[name] = "one is too slow for these requests"
        if prompts + rate / unit.capacity > MOST_BUSY:
            return None
        fleet = self._with_units(fleet, 1)
        found = self._simulate(self, "whole", fleet)
        self._reasons[name] = f"{self._reached(found)}, {unit.dollars:,.2f} USD an hour"
        return self._deployment(fleet, found) if self._meets(found) else None

    def _units(self, plans: list[Plan]) -> Iterator[DecodeUnit]:
        """Decode units of every mode's cheapest layouts for the rate, as the search has them."""
        tokens = self.demand.rate * float(self.requests.output.mean())

        def dollars(plan: Plan) -> float:
            units = -(-tokens // (MOST_BUSY * plan.tokens_per_second))
            return float(units * plan.dollars * plan.tokens_per_second)

        left: dict[PlannedMode, int] = {}
        for plan in sorted(plans, key=lambda plan: (dollars(plan), plan.layout.devices)):
            mode = plan.layout.mode
            left[mode] = left.get(mode, TRIED) - 1
            unit = self.unit(plan) if left[mode] >= 0 else ""
            if isinstance(unit, DecodeUnit):
                yield unit
            elif unit:
                self._reasons[f"decode: {plan.layout.text}"] = unit

    # -------------------------------------------------------------------------- decode units

    def unit(self, plan: Plan, most: int = 0) -> DecodeUnit | str:
        """Returns a unit with `most` slots at most (0: any number), or why it cannot work."""
        layout, target, requests = plan.layout, self.asked.tpot.seconds, self.requests
        hardware = self.searcher.memory.on(layout)
        pace = Pace(self.searcher, layout, requests)
        # Sequences of unequal lengths fit with twice the standard deviation of their sum above it.
        spread = requests.context_spread / (plan.batch * layout.lanes) ** 0.5
        length = (requests.context + 2 * spread) / self.context
        room = min(max(1, int(plan.batch / length)), most or plan.batch)
        slots = pace.largest(room, target)
        if not slots:
            return (
                f"with sequences of unequal lengths not even one a DP group is within "
                f"{target * 1e3:g} ms in {layout.devices} devices ({layout.mode})"
            )
        taken = slots if slots < room else MOST_BUSY * slots
        lanes, output = layout.dp * layout.lanes, float(requests.output.mean())
        capacity = lanes * taken / (output * pace.seconds(max(1, round(taken))))
        return DecodeUnit(plan, slots, hardware, pace, capacity)

    def _least_units(self, unit: DecodeUnit) -> int:
        return _ceil(self.demand.rate / unit.capacity)

    def _fewest_units(self, unit: DecodeUnit, worker: PrefillWorker, workers: int) -> Fleet:
        return self._with_units(Fleet(worker, workers, unit, 1, 1.0), self._least_units(unit))

    def _sized(self, least: Fleet, most: int) -> Fleet | None:
        """The fleet with the fewest prefill workers, up to `most` (0: any), for the TTFT."""

        def meets(number: int) -> bool:
            found = self._simulate(self, "prefill", least._replace(workers=number))
            return found.ttft_asked <= self.asked.ttft.seconds

        number = _fewest(meets, least.workers, most)
        return None if number is None else least._replace(workers=number)

    # ------------------------------------------------------------------------ prefill workers

    def _workers(self) -> Iterator[PrefillWorker]:
        """Prefill workers whose memory holds weights and pages, and that could meet the TTFT."""
        asked, calculator, hosts = self.asked, self._calculator, self._prefill
        requests = self.requests
        modes: tuple[PlannedMode, ...] = ("ep", "tp")
        target = msgspec.structs.replace(asked.target, modes=modes, most_drafts=0)
        layouts = Layouts(calculator.model, hosts, hosts, skewed=self.searcher.skew is not None)
        memory = Memory(calculator, hosts, hosts)
        for layout in layouts.of(target):
            if asked.prefill_devices not in (0, layout.devices) or layout.shared_ranks:
                continue
            hardware = hosts[layout.attention]
            for chunk in CHUNKS:
                tokens = memory.tokens(layout, HELD_SLOTS, chunk, asked.longest)
                if not tokens:
                    continue
                chunks = self._chunks(layout, (hardware,) * 2, chunk)
                capacity = layout.dp / chunks.busy(requests)
                alone = chunks.alone(*requests.quantile(asked.ttft.percent / 100))
                yield PrefillWorker(layout, chunk, hardware, tokens, capacity, alone)

    def _least_workers(self, worker: PrefillWorker) -> int:
        return _ceil(self.demand.rate / (MOST_BUSY * worker.capacity))

    def _linked(self, fleet: Fleet) -> Fleet:
        """The fleet with enough workers and units that hand-offs keep no link above `MOST_BUSY`."""
        seconds = self.link(fleet).seconds(self.requests.computed)
        least = _ceil(self.demand.rate * seconds / MOST_BUSY)
        fleet = fleet._replace(workers=max(fleet.workers, least))
        return fleet if least <= fleet.units else self._with_units(fleet, least)

    def _whole(self, fleet: Fleet) -> FleetPlan | None:
        """The deployment of this fleet, with as many more workers and units as it takes."""
        for _ in range(GROWN):
            found = self._simulate(self, "whole", fleet)
            if self._meets(found):
                return self._deployment(fleet, found)
            self._reasons["whole fleet"] = f"{fleet.text}: {self._reached(found)}"
            slow = found.ttft_asked > self.asked.ttft.seconds
            waits = {part: times.p95 for part, times in found.waits.items() if times is not None}
            if slow and fleet.workers and waits.get("prefill", 0.0) >= waits.get("domain", 0.0):
                fleet = fleet._replace(workers=fleet.workers + -(-fleet.workers // PART))
            else:
                fleet = self._with_units(fleet, fleet.units + -(-fleet.units // PART))
        return None

    def _reached(self, found: FleetResult) -> str:
        ttft, tpot = found.ttft_asked, found.tpot_asked * 1e3
        asked = self.asked
        return (
            f"TTFT p{asked.ttft.percent:g} {ttft:.2g} s, TPOT p{asked.tpot.percent:g} {tpot:.3g} ms"
        )

    def _with_units(self, fleet: Fleet, units: int) -> Fleet:
        taken = fleet.unit.taken(self.demand.rate / units, float(self.requests.output.mean()))
        return fleet._replace(units=units, taken=taken)

    # ------------------------------------------------------------------------------- together

    def times(self, layout: Layout, hardware: tuple[Hardware, Hardware]) -> Rooflines:
        """Stage times of a layout, with its experts placed as the engine places them."""
        calculator, moe = self._calculator, self.model.moe
        sizes = layout.slots(moe.experts if moe else 0)
        if sizes not in self._loads:
            self._loads[sizes] = expert_loads(layout, self.model, self.searcher.skew, placed=True)
        return Rooflines(layout, calculator, calculator, hardware, self._loads[sizes])

    def _chunks(self, layout: Layout, hardware: tuple[Hardware, Hardware], chunk: int) -> Chunks:
        return Chunks(layout, self.times(layout, hardware), chunk)

    def link(self, fleet: Fleet) -> Handoff:
        """The pages link, at the network of its slower end."""
        worker, unit = fleet.worker, fleet.unit
        ends = (
            worker.hardware.network * worker.layout.devices,
            unit.hardware[0].network * unit.layout.attention_devices,
        )
        return Handoff(
            token_bytes=self._calculator.handed_over,
            bytes_per_second=min(ends),
            latency=self.asked.pages_latency,
        )

    def _deployment(self, fleet: Fleet, found: FleetResult) -> FleetPlan:
        layout, (a, f) = fleet.unit.layout, fleet.unit.hardware
        name = "decode" if layout.topology.has("colocated") else "attention"
        parts = [
            ("prefill", fleet.worker.hardware, fleet.workers * fleet.worker.layout.devices),
            (name, a, fleet.units * layout.attention_devices),
            ("ffn", f, fleet.units * layout.ffn_devices),
        ]
        spares = self.asked.spares
        roles = tuple(
            Role(name, hardware, devices, spares.hosts(-(-devices // hardware.devices_per_host)))
            for name, hardware, devices in parts
            if devices
        )
        return FleetPlan(
            fleet=fleet, demand=self.demand, link=self.link(fleet), prediction=found, roles=roles
        )

    def again(self, made: FleetPlan, most: int = 0) -> FleetPlan | None:
        """Returns a deployment of the same kinds for another demand or other targets, with `most`
        slots of a unit at most (0: any number); None: no number of them meets the targets."""
        old = made.fleet.worker
        unit = self.unit(made.fleet.unit.plan, most)
        if isinstance(unit, str):
            return None
        chunks = self._chunks(old.layout, (old.hardware,) * 2, old.chunk)
        worker = old._replace(capacity=old.layout.dp / chunks.busy(self.requests))
        workers = self._least_workers(worker) if made.fleet.workers else 0
        fleet = self._fewest_units(unit, worker, workers)
        fleet = self._linked(fleet) if workers else fleet
        same = (fleet.workers, fleet.units) == (made.fleet.workers, made.fleet.units)
        if self.demand == made.demand and not most and same and self._meets(made.prediction):
            return made
        return self._whole(fleet)

    def _meets(self, found: FleetResult) -> bool:
        asked = self.asked
        return found.ttft_asked <= asked.ttft.seconds and found.tpot_asked <= asked.tpot.seconds

    def asking(self, asked: Asked) -> "Sizer":
        return Sizer(self.searcher, self._prefill, asked, self._simulate)


Simulate = Callable[[Sizer, DeployedPart, Fleet], FleetResult]
"""Simulates a fleet, or a part of it, for the sizer's demand."""


def _ceil(number: float) -> int:
    """The least whole number not below, at least 1."""
    return max(1, math.ceil(number - 1e-9))


def _fewest(meets: Callable[[int], bool], least: int, most: int = 0) -> int | None:
    """The least number from `least` on that meets what all larger ones meet, too; None: `most` does
    not meet it, which is asked first. Where that is 0 the bound is `FURTHER` times as many, and a
    few, and `least` is asked first."""
    if not most:
        if meets(least):
            return least
        least, most = least + 1, FURTHER * least + 4
    if not meets(most):
        return None
    return least + bisect_left(range(least, most), True, key=meets)
