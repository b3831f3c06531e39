"""`plan simulate` of a fleet: prefill workers, the pages link and domains, with arrivals.

A deployment file with `prefill.workers` is a fleet; any other is simulated by
`planner/simulate_command.py`, whose options these are added to.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import msgspec

from jaxserve.config.deployment import Deployment
from jaxserve.config.load import deployment_of
from jaxserve.errors import ConfigError
from jaxserve.fleet.simulation import FleetResult, FleetSimulation, decode_workers
from jaxserve.fleet.simulation_conditions import FleetConditions, FleetTraffic, Loss, PagesLink
from jaxserve.planner import simulate_command
from jaxserve.planner.deploy_demand import Demand
from jaxserve.planner.hardware import load_hardware
from jaxserve.planner.noise import ExpertLoads
from jaxserve.planner.options import (
    jitter,
    read_deployment,
    read_scenario,
    seconds,
    tokens,
)
from jaxserve.planner.scenario import Roles, Scenario, scenario
from jaxserve.planner.simulate_command import TIMES, check_lengths, times_row
from jaxserve.planner.view import Part, Report, show


def shared_tokens(text: str) -> int:
    """Parses `0` or a number of tokens."""
    return 0 if text == "0" else tokens(text)


def loss(text: str) -> Loss:
    """Parses `domain 0@20s+5s`: a worker, when it is lost, and how long it stays away."""
    worker, _, times = text.rpartition("@")
    at, _, back = times.partition("+")
    if not worker or not back:
        raise argparse.ArgumentTypeError(f"{text!r}: expected WORKER@AT+FOR, as in domain 0@20s+5s")
    return Loss(worker=worker, at=seconds(at), seconds=seconds(back))


def run(options: argparse.Namespace) -> None:
    """Simulates the deployment, a fleet or any other, and shows the result."""
    deployment = read_deployment(options)
    if not deployment.prefill.workers:
        return simulate_command.run(options)
    ready = read_simulation(options, deployment)
    result = ready.simulation.run()
    parts = {"traffic": ready.traffic, "conditions": ready.conditions, "result": result}
    tree = {name: msgspec.to_builtins(part) for name, part in parts.items()}
    told = [f"{name}: {msgspec.json.encode(parts[name]).decode()}" for name in tree]
    shown = [Part(rows=_rows(deployment, result)), Part("What went in", lines=told[:2], aside=True)]
    return show(options, Report("A fleet, simulated", shown, tree))


class Ready(NamedTuple):
    """A prepared simulation that has not run."""

    simulation: FleetSimulation
    deployment: Deployment
    traffic: FleetTraffic
    conditions: FleetConditions


def read_simulation(options: argparse.Namespace, deployment: Deployment) -> Ready:
    """Prepares the simulation that the options describe.

    Raises:
      ConfigError: an option is wrong.
    """
    if not options.rate:
        raise ConfigError("--rate 0: a fleet needs a rate above 0")
    if 2 * options.uncounted >= options.requests:
        raise ConfigError(
            f"--uncounted {options.uncounted}: none of --requests {options.requests} are left"
        )
    domain = read_scenario(options, options.prompt + options.output // 2)
    prefill = _prefill(domain, options.prompt // 2, options.configs)
    lengths = check_lengths(options, domain)
    demand = Demand(
        rate=options.rate, prompt=options.prompt, output=options.output, spread=options.spread
    )
    requests = demand.requests(lengths.longest, deployment.cache.page_size)
    running = (each.tolist() for each in requests.running(options.running))
    traffic = FleetTraffic(
        lengths=lengths,
        rate=options.rate,
        requests=options.requests,
        warm_up=options.requests // 10 if options.uncounted < 0 else options.uncounted,
        cool_down=0 if options.running else max(0, options.uncounted),
        shared=options.shared,
        prefixes=options.prefixes,
        hits=options.prefix_hits,
        running=tuple(zip(*running, strict=True)),
    )
    conditions = FleetConditions(
        request_seconds=domain.attention.assumed.request_seconds,
        pages=_pages(domain, prefill, options),
        host_seconds=options.host,
        jitter=jitter(options),
        seed=options.seed,
        losses=tuple(options.lose),
    )
    simulation = FleetSimulation(
        deployment,
        traffic,
        conditions,
        domain=domain.rooflines(_loads(options, domain)),
        prefill=prefill.rooflines(_loads(options, prefill)),
    )
    # The report leaves out the lengths of thousands of sequences.
    return Ready(simulation, deployment, msgspec.structs.replace(traffic, running=()), conditions)


def _loads(options: argparse.Namespace, made: Scenario) -> ExpertLoads | None:
    home, placed = simulate_command.read_loads(options, made)
    return placed or home


def _prefill(domain: Scenario, context: int, configs: Path) -> Scenario:
    """Returns the scenario of a prefill worker, on the hardware that the file names for it, or else
    on the attention role's."""
    made = deployment_of(domain.deployment, "prefill")
    calculator = domain.attention
    named = domain.deployment.prefill.attention.get("hardware", "")
    roles = domain.roles
    if named:
        hardware = load_hardware(named, None, configs)
        roles = Roles(hardware, hardware, (named, named))
    assumed, measured = calculator.assumed, calculator.measured
    return scenario(made, calculator.model, domain.stored, roles, context, assumed, measured)


def _pages(domain: Scenario, prefill: Scenario, options: argparse.Namespace) -> PagesLink:
    """Returns the pages link, at the rate of its slower end."""
    size = domain.attention.handed_over
    ends = [
        made.roles.attention.network * made.deployment.attention.devices
        for made in (domain, prefill)
    ]
    speed = options.pages_gb_s * 1e9 or min(ends)
    return PagesLink(seconds_per_token=size / speed, latency=options.pages_latency)


def _rows(deployment: Deployment, result: FleetResult) -> list[list[str]]:
    """Returns table rows, one for each quantity."""
    prefill = deployment.prefill.workers
    rows = [["", *TIMES]]
    rows += [times_row("TTFT ms", result.ttft), times_row("TPOT ms", result.tpot)]
    rows += [times_row(f"wait for {role} ms", found) for role, found in result.waits.items()]
    numbers = {
        "tokens/s": f"{result.tokens_per_second:.0f}",
        "requests finished": str(result.finished),
        "requests refused": str(result.refused),
        "requests begun again elsewhere": str(result.replays),
        "prompt tokens found by prefill workers": f"{result.found:.1%}",
        **{f"{role} busy": f"{share:.1%}" for role, share in result.busy.items()},
        "prefill workers, domains": f"{prefill}, {decode_workers(deployment)}",
        "simulated s": f"{result.seconds:.3f}",
    }
    return rows + [[name, text, "", "", "", ""] for name, text in numbers.items()]
