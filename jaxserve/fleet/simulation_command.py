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
from jaxserve.planner.deployment_options import read_deployment, read_scenario
from jaxserve.planner.hardware import load_hardware
from jaxserve.planner.noise import ExpertLoads, Lengths
from jaxserve.planner.quantities import jitter, seconds, tokens
from jaxserve.planner.scenario import Roles, Scenario, scenario
from jaxserve.planner.simulate import Percentiles
from jaxserve.planner.text import grid, json_text


def add_fleet(command: argparse.ArgumentParser) -> None:
    """The options of a fleet, beside those of one deployment."""
    add = command.add_argument
    add("--requests", type=int, default=500, help="of a fleet: 500, of which a tenth warms up")
    add("--uncounted", type=int, default=-1, help="of a fleet, first and last: a tenth, and none")
    add("--pages-latency", default="2ms", help="of a hand-off, beside its bytes: 2ms")
    add("--pages-gb-s", type=float, default=0.0, help="of a worker; 0: its devices' network")
    add("--shared", default="0", help="of a fleet: tokens with which prompts begin alike: 0")
    add("--prefix-hits", type=float, default=0.0, help="part of every prompt that others have: 0")
    add("--prefixes", type=int, default=1, help="how many such beginnings there are: 1")
    add(
        "--lose",
        action="append",
        default=[],
        metavar="WORKER@AT+FOR",
        help="of a fleet: a worker is lost and comes back, as in 'domain 0@20s+5s'; repeatable",
    )
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Simulates a fleet, or whatever else the deployment is, and shows."""
    deployment = read_deployment(options)
    if not deployment.prefill.workers:
        return simulate_command.run(options)
    ready = read_simulation(options, deployment)
    return _show(options, ready, ready.simulation.run())


class Ready(NamedTuple):
    """A simulation that has not run."""

    simulation: FleetSimulation
    deployment: Deployment
    traffic: FleetTraffic
    conditions: FleetConditions


def read_simulation(options: argparse.Namespace, deployment: Deployment) -> Ready:
    """The simulation that the options ask for.

    Raises:
      ConfigError: one of them is wrong.
    """
    if options.rate <= 0 or not 1 <= options.requests <= 10**6:
        raise ConfigError(
            f"--rate {options.rate:g} and --requests {options.requests}: a fleet needs a rate "
            "above 0 and 1 to 1000000 requests"
        )
    if options.uncounted >= 0 and 2 * options.uncounted >= options.requests:
        raise ConfigError(
            f"--uncounted {options.uncounted}: none of --requests {options.requests} are left"
        )
    if options.prefixes < 1:
        raise ConfigError(f"--prefixes {options.prefixes}: expected 1 or more")
    if not 0 <= options.prefix_hits < 1:
        raise ConfigError(f"--prefix-hits {options.prefix_hits:g}: expected 0 to below 1")
    prompt, output = tokens(options.prompt, "--prompt"), tokens(options.output, "--output")
    longest = deployment.scheduler.max_length
    if prompt + output > longest:
        raise ConfigError(
            f"--prompt {prompt} and --output {output} exceed scheduler.max_length = {longest}"
        )
    traffic = FleetTraffic(
        lengths=Lengths(prompt=prompt, output=output, spread=options.spread, longest=longest),
        rate=options.rate,
        requests=options.requests,
        warm_up=options.requests // 10 if options.uncounted < 0 else options.uncounted,
        cool_down=max(0, options.uncounted),
        shared=0 if options.shared == "0" else tokens(options.shared, "--shared"),
        prefixes=options.prefixes,
        hits=options.prefix_hits,
    )
    domain = read_scenario(options, prompt + output // 2)
    prefill = _prefill(domain, prompt // 2, options.configs)
    conditions = FleetConditions(
        pages=_pages(domain, prefill, options),
        host_seconds=seconds(options.host, "--host"),
        jitter=jitter(options.jitter, options.stall),
        seed=options.seed,
        losses=tuple(map(_loss, options.lose)),
    )
    simulation = FleetSimulation(
        deployment,
        traffic,
        conditions,
        domain=domain.rooflines(_loads(options, domain)),
        prefill=prefill.rooflines(_loads(options, prefill)),
    )
    return Ready(simulation, deployment, traffic, conditions)


def _show(options: argparse.Namespace, ready: Ready, result: FleetResult) -> int:
    if options.json:
        parts = {"traffic": ready.traffic, "conditions": ready.conditions, "result": result}
        print(json_text({name: msgspec.to_builtins(part) for name, part in parts.items()}))
    else:
        print(grid(_rows(ready.deployment, result)))
    return 0


def _loads(options: argparse.Namespace, made: Scenario) -> ExpertLoads | None:
    home, placed = simulate_command.read_loads(options, made)
    return placed or home


def _loss(text: str) -> Loss:
    """A lost worker from `WORKER@AT+FOR`."""
    worker, _, times = text.rpartition("@")
    at, _, back = times.partition("+")
    if not worker or not back:
        raise ConfigError(f"--lose {text!r}: expected WORKER@AT+FOR, as in domain 0@20s+5s")
    return Loss(worker=worker, at=seconds(at, "--lose"), seconds=seconds(back, "--lose"))


def _prefill(domain: Scenario, context: int, configs: Path) -> Scenario:
    """What a prefill worker runs, on its own hardware if the file names it, or else on the
    attention role's."""
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
    """The pages link, at the slower of its ends."""
    calculator = domain.attention
    size = sum(
        group.layers * calculator.cache_row(group, 1)
        for group in calculator.model.attention
        if group.kind != "lightning"
    )
    ends = [
        made.roles.attention.network * made.deployment.attention.devices
        for made in (domain, prefill)
    ]
    speed = options.pages_gb_s * 1e9 or min(ends)
    return PagesLink(
        seconds_per_token=size / speed, latency=seconds(options.pages_latency, "--pages-latency")
    )


def _rows(deployment: Deployment, result: FleetResult) -> list[list[str]]:
    """A quantity a row."""

    def times(name: str, found: Percentiles | None) -> list[str]:
        return [name, *(["-"] * 4 if found is None else (f"{value * 1e3:.2f}" for value in found))]

    prefill = deployment.prefill.workers
    rows = [["", "mean", "p50", "p90", "p99"]]
    rows += [times("TTFT ms", result.ttft), times("TPOT ms", result.tpot)]
    rows += [times(f"wait for {role} ms", found) for role, found in result.waits.items()]
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
    return rows + [[name, text, "", "", ""] for name, text in numbers.items()]
