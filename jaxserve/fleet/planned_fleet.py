"""Runs a planned fleet in simulated time, all of it or a role. Called by `deploy_command.py`.

Every plan is simulated with the same lengths and the same gaps between requests, so that two plans
differ by what they are and not by chance. Of a large fleet a part is run, with its part of the
requests: the router balances over a few workers nearly as well as over many.
"""

from pathlib import Path

import msgspec
import numpy as np

from jaxserve.config.load import load_deployment
from jaxserve.fleet.simulation import FleetSimulation
from jaxserve.fleet.simulation_conditions import FleetConditions, FleetTraffic, PagesLink
from jaxserve.planner.deploy import Asked, Part, Prediction, Trial
from jaxserve.planner.deploy_fleet import Fleet, Slowed
from jaxserve.planner.simulate import Times
from jaxserve.planner.stage_times import Rows, StepTimes

COUNTED = 300
"""Requests that count, where percentiles up to 95 are asked for; five times as many above."""
TOKENS = 60_000
"""Output tokens of a simulation of decoding, about: a second."""
STEPS = 1_500
"""Steps of a role in a simulation, about: some seconds."""
LEAST = 50
"""Requests that count in any simulation."""
GROUPS = 64
"""DP groups of the prefill workers that are simulated at most."""
SEQUENCES = 1024
"""Sequences that decode at a time in a simulation at most."""
ROUNDED = 0.02
"""Share by which workers for each unit may differ in the part of a fleet that is simulated."""
PARTS: tuple[Part, Part] = ("prefill", "decode")
PACED_SLOTS = 4096
HOST_SECONDS = 1e-4
"""Time of the host at every step's end, as `plan simulate` has it."""


class Paced:
    """Stage times of a decode unit that keeps its pace whatever the batch."""

    layers, overlapped = 1, False

    def __init__(self, seconds: float):
        self._step = StepTimes([np.array([seconds])], [0.0], [0.0], [0.0], 0.0)

    def step(self, rows: Rows) -> StepTimes:
        """The same for all sequences."""
        return self._step


def simulated(trial: Trial, request_seconds: float) -> Prediction:
    """Returns the times of a fleet's requests.

    Args:
      request_seconds: of HTTP and the router, a request.
    """
    fleet, demand, part, keys = trial.fleet, trial.demand, trial.part, dict(trial.keys)
    workers, units = _part(fleet, part)
    share = workers / fleet.workers if part == "prefill" else units / fleet.units
    # Where few sequences decode at a time, they take many steps for a few requests.
    each = units / (demand.rate * share * fleet.pace)
    if part == "whole" and each * LEAST > 2 * STEPS:
        of_prefill, of_decode = (
            simulated(trial._replace(part=one), request_seconds) for one in PARTS
        )
        busy = {**of_decode.busy, "prefill": of_prefill.busy["prefill"]}
        tpot = {"tpot": of_decode.tpot, "tpot_asked": of_decode.tpot_asked, "busy": busy}
        return msgspec.structs.replace(of_prefill, **tpot)
    stride = 1
    prompts, output = trial.requests.prompt - trial.requests.found, demand.output
    counted = COUNTED * (5 if max(trial.asked.ttft.percent, trial.asked.tpot.percent) > 95 else 1)
    running: tuple[tuple[int, int], ...] = ()
    domain, prefill = trial.domain, trial.prefill
    if part != "decode":
        steps = float(prompts.mean()) / fleet.worker.chunk / min(fleet.worker.layout.dp, 4)
        counted = min(counted, max(LEAST, int(STEPS / max(steps, 0.1))))
    if part == "prefill":
        output = 1
        lanes = fleet.unit.layout.lanes
        domain = Paced(fleet.pace / lanes)
        keys |= {"mode": "colocated", "lanes": lanes, "ffn": {}, "domains": units}
        keys["attention"] = {"dp": 1, "tp": 1}
        keys["cache"] = {**keys["cache"], "pages": 2**24}
        slots = {"slots": PACED_SLOTS, "token_budget": PACED_SLOTS, "token_buckets": [PACED_SLOTS]}
        keys["scheduler"] = {**keys["scheduler"], **slots}
    else:
        counted = min(counted, max(LEAST, min(TOKENS // output, int(STEPS / each))))
        if part == "decode":
            # A simulated step stands for several, of sequences that are as long on the mean.
            stride = max(1, min(round(counted * each / STEPS), output // 16))
            domain = Slowed(domain, stride)
            output //= stride
        held = round(fleet.sequences * units / fleet.units)
        length, left = trial.requests.running(max(1, held))
        left = np.maximum(1, left // stride)
        running = tuple(zip(length.tolist(), left.tolist(), strict=True))
    warm = 0 if part == "decode" else min(counted, 2 * workers * fleet.worker.layout.dp)
    if part == "decode":
        keys["prefill"] = {}
        keys["fleet"] = {"domain_waiting": PACED_SLOTS}
    else:
        keys["prefill"] = {**keys["prefill"], "workers": workers}
    if keys["mode"] == "afd":
        addresses = {"domains": [f"decode-{one}:1" for one in range(units)]}
        if part == "whole":
            addresses["prefill"] = [f"prefill-{one}:1" for one in range(workers)]
        keys["fleet"] = {**keys["fleet"], **addresses}
    else:
        keys["domains"] = units
    deployment = load_deployment(Path(), keys)
    traffic = FleetTraffic(
        lengths=msgspec.structs.replace(
            demand.lengths(trial.asked.longest),
            prompt=demand.prompt + (demand.output - output) // 2 * (stride > 1),
            output=output,
        ),
        rate=demand.rate * share,
        requests=warm + counted,
        warm_up=warm,
        hits=demand.hits,
        running=running,
    )
    link = trial.link
    pages = PagesLink(
        seconds_per_token=link.token_bytes / link.bytes_per_second, latency=link.latency
    )
    conditions = FleetConditions(
        pages=pages,
        host_seconds=HOST_SECONDS,
        request_seconds=request_seconds,
        prefilled=part == "decode",
    )
    simulation = FleetSimulation(
        deployment,
        traffic,
        conditions,
        domain=domain,
        prefill=None if part == "decode" else prefill,
    )
    return prediction(simulation, trial.asked, stride)


def prediction(simulation: FleetSimulation, asked: Asked, stride: int = 1) -> Prediction:
    """Runs a simulation; returns its requests' times.

    Args:
      stride: tokens that one simulated token stands for.
    """
    result = simulation.run()
    ttft, tpot = (np.array(each or [0.0]) for each in simulation.samples())
    tpot /= stride
    of_ttft, of_tpot = Times.of(ttft), Times.of(tpot)
    assert of_ttft is not None
    assert of_tpot is not None
    return Prediction(
        ttft=of_ttft,
        ttft_asked=float(np.percentile(ttft, asked.ttft.percent)),
        tpot=of_tpot,
        tpot_asked=float(np.percentile(tpot, asked.tpot.percent)),
        parts={name: one for name, one in result.waits.items() if one is not None},
        busy=result.busy,
        refused=result.refused,
        requests=result.finished,
    )


def _part(fleet: Fleet, part: Part) -> tuple[int, int]:
    """Workers and units that are simulated: as few as stand for the fleet, in its proportion."""
    groups, sequences = fleet.worker.layout.dp, fleet.sequences / fleet.units
    workers = min(fleet.workers, max(2, GROUPS // groups))
    if part == "prefill":
        return workers, max(1, round(fleet.units * workers / fleet.workers))
    units = min(fleet.units, max(1, int(SEQUENCES / sequences)))
    if part == "decode":
        return 0, units
    for count in range(units, fleet.units):
        exact = fleet.workers * count / fleet.units
        if round(exact) >= 1 and abs(round(exact) / exact - 1) <= ROUNDED:
            return round(exact), count
    return fleet.workers, fleet.units
