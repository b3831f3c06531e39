"""`plan simulate`: a deployment, or a fleet with a router, in simulated time.

A deployment file with `prefill.workers`, or any file with `--requests`, is a fleet with arrivals
(`simulation.py`). With `--workers`, attention workers share an ffn worker over `pull`
(`planner/pool.py`). Any other file is one deployment, whose lanes make a number of steps
(`planner/simulate.py`).
"""

import argparse
import math
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from jaxserve.config.deployment import Deployment
from jaxserve.config.load import deployment_of
from jaxserve.errors import ConfigError
from jaxserve.fleet.simulation import (
    FleetConditions,
    FleetSimulation,
    FleetTraffic,
    Loss,
    decode_workers,
)
from jaxserve.link.remote.cohorts import Cohorts
from jaxserve.link.remote.passes import POLICIES
from jaxserve.observe import timeline_view
from jaxserve.planner.demand import Demand, Lengths
from jaxserve.planner.deploy_fleet import Handoff
from jaxserve.planner.hardware import load_hardware
from jaxserve.planner.link_load import check_link
from jaxserve.planner.models import model_config
from jaxserve.planner.noise import ExpertLoads, read_skew
from jaxserve.planner.options import TABLE, assumptions, jitter, read_deployment, read_scenario
from jaxserve.planner.pool import ExpertPool, expert_pool, simulate_pool
from jaxserve.planner.results import FleetResult, Result, Times
from jaxserve.planner.scenario import Roles, Scenario, scenario
from jaxserve.planner.simulate import Conditions, Simulation
from jaxserve.planner.stage_times import expert_loads
from jaxserve.planner.view import PagePart, Report, show, times_row

SCOPE = (
    "decode only, every slot taken: prompts come computed from elsewhere; --rate simulates "
    "requests that come to a router"
)
REQUESTS = 500
"""Requests of a fleet's simulation."""
NUMBERS = {
    "tokens_per_second": ("tokens/s", ".0f"),
    "tokens_per_device": ("tokens/s/device", ".1f"),
    "sequences": ("sequences", ".0f"),
    "context": ("context", ".0f"),
    "finished": ("requests finished", "d"),
    "refused": ("requests refused", "d"),
    "replays": ("requests begun again elsewhere", "d"),
    "preemptions": ("preemptions", "d"),
    "found": ("prompt tokens found by prefill workers", ".1%"),
    "attention_busy": ("attention busy", ".1%"),
    "ffn_busy": ("ffn busy", ".1%"),
    "dispatch_busy": ("dispatch busy", ".1%"),
    "combine_busy": ("combine busy", ".1%"),
    "bubble": ("bubble", ".1%"),
    "seconds": ("simulated s", ".3f"),
}
"""Label and format of the results' numbers, by their names; no result has all."""


def run(options: argparse.Namespace) -> None:
    """Simulates the deployment, or the fleet, and shows the result."""
    deployment = read_deployment(options)
    _check_link(deployment, assumptions(options.assume).pull_gb_s)
    if options.workers:
        return show(options, _pool(options))
    fleet = deployment.prefill.workers or options.rate or options.requests is not None
    show(options, _fleet(options, deployment) if fleet else _alone(options))


def _check_link(deployment: Deployment, gb_per_second: float) -> None:
    """Refuses what `serve --check` refuses: a TPOT that the link between runtimes cannot keep."""
    if not (deployment.topology.crosses_runtimes and deployment.fleet.tpot_seconds):
        return
    check_link(model_config(Path(deployment.model)), deployment, gb_per_second)


def _rows(result: Result | FleetResult, more: dict[str, str]) -> list[list[str]]:
    """Returns table rows, one for each quantity: times, numbers, and more numbers."""
    rows = [["", *Times.__struct_fields__]]
    rows.append(times_row("TPOT ms", result.tpot))
    if isinstance(result, FleetResult):
        rows.insert(1, times_row("TTFT ms", result.ttft))
        rows += [times_row(f"wait for {role} ms", found) for role, found in result.waits.items()]
        more |= {f"{role} busy": f"{share:.1%}" for role, share in result.busy.items()}
    numbers = {
        label: format(getattr(result, name), form)
        for name, (label, form) in NUMBERS.items()
        if hasattr(result, name)
    }
    rows += [[name, text, "", "", "", ""] for name, text in (numbers | more).items()]
    return rows


def _read_loads(options: argparse.Namespace, made: Scenario) -> ExpertLoads | None:
    """Returns how tokens fall on a deployment's ffn devices, with experts at home or, with
    --placed, where a rebalance puts them; None: evenly."""
    skew = None if options.skew is None else read_skew(options.skew)
    asked = {"seed": options.seed, "placed": options.placed}
    return expert_loads(made.layout, made.ffn.model, skew, **asked)


def _lengths(options: argparse.Namespace, made: Scenario) -> Lengths:
    """Returns the lengths of prompts and outputs. Raises ConfigError if a sequence of mean lengths
    is longer than the deployment allows."""
    longest = made.deployment.scheduler.max_length
    if options.prompt + options.output > longest:
        raise ConfigError(
            f"--prompt {options.prompt} and --output {options.output} exceed scheduler.max_length "
            f"= {longest}"
        )
    lengths = {"prompt": options.prompt, "output": options.output}
    return Lengths(**lengths, spread=options.spread, longest=longest)


# ------------------------------------------------------------------------------ one deployment


def _alone(options: argparse.Namespace) -> Report:
    """Simulates steps of a deployment."""
    if options.warm_up >= options.steps:
        raise ConfigError(f"--warm-up {options.warm_up}: expected 0 to {options.steps - 1}")
    made = read_scenario(options, options.prompt + options.output // 2)
    lengths = _lengths(options, made)
    afd = made.deployment.topology.has("ffn")
    conditions = Conditions(
        domains=options.domains or (made.deployment.domains if afd else 1),
        steps=options.steps,
        warm_up=options.warm_up,
        jitter=jitter(options),
        host_seconds=options.host,
        tokens_a_step=1 + options.acceptance,
        seed=options.seed,
    )
    loads = _read_loads(options, made)
    result, spans = Simulation(made.deployment, made.rooflines(loads), lengths, conditions).run()
    if options.timeline:
        timeline_view.write(options.timeline, spans, "as simulated")
    parts = {"lengths": lengths, "conditions": conditions, "result": result}
    tree: dict[str, Any] = {"scope": SCOPE, **msgspec.to_builtins(parts)}
    tree["result"]["bubble"] = result.bubble
    more: dict[str, str] = {}
    if loads is not None:
        tree["result"]["balance"] = loads.balance
        more["balance of experts"] = f"{loads.balance:.3f}"
    notes = [SCOPE]
    if not result.steps:
        notes.append("nothing was counted: more --steps, or fewer of --warm-up")
    layout = made.layout
    told = [
        f"{conditions.domains} x {layout.attention_devices} {made.roles.attention.name} for "
        f"attention (dp {layout.dp}, tp {layout.tp}), {layout.ffn_devices} {made.roles.ffn.name} "
        f"for the FFN (ep {layout.ep}, tp {layout.ffn_tp}), {layout.lanes} lanes",
        *_told(lengths=lengths, conditions=conditions, assumed=made.attention.assumed),
    ]
    page = timeline_view.page(spans, timeline_view.steady_summary(spans), "as simulated").decode()
    picture = f'<iframe srcdoc="{escape(page)}" width="100%" height="720"></iframe>'
    shown = [
        PagePart(rows=_rows(result, more), lines=notes),
        PagePart("The last steps", pictures=[picture], aside=True),
        PagePart("What went in", lines=told, aside=True),
    ]
    return Report("A deployment, simulated", shown, tree)


def _told(**parts: msgspec.Struct) -> list[str]:
    return [f"{name}: {msgspec.json.encode(part).decode()}" for name, part in parts.items()]


# ------------------------------------------------------------- attention workers on an ffn worker


def _pool(options: argparse.Namespace) -> Report:
    """Simulates independent attention workers under every policy of the ffn worker. Raises
    ConfigError if an option is wrong."""
    made = read_scenario(options, options.prompt + options.output // 2)
    if not made.deployment.topology.crosses_runtimes:
        raise ConfigError(f"--workers: link.transport = {made.deployment.link.transport}, not pull")
    count, context = options.workers, options.prompt + options.output / 2
    noise = jitter(options).spread.get("attend", 0.0)
    settings = msgspec.structs.asdict(expert_pool(made, count, context, options.spread, noise))
    for setting in options.pool:
        settings |= setting
    try:
        pool = msgspec.convert(settings, ExpertPool)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--pool: {error}") from None
    asked = {"seed": options.seed, "iterations": options.steps, "warm_up": options.warm_up}
    policies = {name: (make(count), 1) for name, make in POLICIES.items()}
    policies["lockstep"] = Cohorts(count, math.inf, math.inf), 1
    policies["3 domains in turn"] = Cohorts(count, math.inf, math.inf), 3
    found = {
        name: simulate_pool(pool, policy, domains=domains, **asked)
        for name, (policy, domains) in policies.items()
    }
    rows = [["", "tokens/s a worker", "iteration ms p50", "p99", "longest", "messages a pass"]]
    for name, one in found.items():
        iteration = (f"{seconds * 1e3:.1f}" for seconds in (one.p50, one.p99, one.longest))
        rows.append([name, f"{one.tokens:.0f}", *iteration, f"{one.messages:.1f}"])
    meaning, given = TABLE["pool"], msgspec.structs.asdict(pool).items()
    lines = [f"{name} = {value}: {meaning[name]}" for name, value in given]
    told = PagePart("What went in", lines=lines, aside=True)
    title = f"{count} attention workers on an ffn worker, simulated"
    return Report(title, [PagePart(rows=rows), told], {"pool": pool, "result": found})


# ------------------------------------------------------------------------------------- a fleet


def _fleet(options: argparse.Namespace, deployment: Deployment) -> Report:
    """Simulates requests to a fleet."""
    simulation, traffic, conditions = read_simulation(options, deployment)
    result = simulation.run()
    # The report leaves out the lengths of thousands of sequences.
    inputs = {"traffic": msgspec.structs.replace(traffic, running=()), "conditions": conditions}
    workers = f"{deployment.prefill.workers}, {decode_workers(deployment)}"
    shown = [
        PagePart(rows=_rows(result, {"prefill workers, domains": workers})),
        PagePart("What went in", lines=_told(**inputs), aside=True),
    ]
    return Report("A fleet, simulated", shown, msgspec.to_builtins(inputs | {"result": result}))


def read_simulation(
    options: argparse.Namespace,
    deployment: Deployment,
    percents: tuple[float, float] = (95.0, 95.0),
) -> tuple[FleetSimulation, FleetTraffic, FleetConditions]:
    """Prepares the simulation that the options describe.

    Args:
      percents: as in `FleetTraffic`.

    Raises:
      ConfigError: an option is wrong.
    """
    from jaxserve.roles.sizing import attention_cost  # imports JAX

    count = REQUESTS if options.requests is None else options.requests
    if not options.rate:
        raise ConfigError("--rate 0: a fleet needs a rate above 0")
    if 2 * options.uncounted >= count:
        raise ConfigError(f"--uncounted {options.uncounted}: none of --requests {count} are left")
    domain = read_scenario(options, options.prompt + options.output // 2)
    workers = [domain]
    if deployment.prefill.workers:
        workers.append(_prefill(domain, options.prompt // 2, options.configs))
    elif options.running:
        raise ConfigError(f"--running {options.running}: there is no prefill worker in the file")
    lengths = _lengths(options, domain)
    demand = Demand(
        rate=options.rate, prompt=options.prompt, output=options.output, spread=options.spread
    )
    requests = demand.requests(lengths.longest, deployment.cache.page_size)
    running = (each.tolist() for each in requests.running(options.running))
    traffic = FleetTraffic(
        lengths=lengths,
        rate=options.rate,
        requests=count,
        warm_up=count // 10 if options.uncounted < 0 else options.uncounted,
        cool_down=0 if options.running else max(0, options.uncounted),
        shared=options.shared,
        prefixes=options.prefixes,
        hits=options.prefix_hits,
        running=tuple(zip(*running, strict=True)),
        percents=percents,
    )
    # The pages link has the rate of its slower end.
    network = [one.roles.attention.network * one.deployment.attention.devices for one in workers]
    conditions = FleetConditions(
        request_seconds=domain.attention.assumed.request_seconds,
        pages=Handoff(
            token_bytes=domain.attention.handed_over,
            bytes_per_second=options.pages_gb_s * 1e9 or min(network),
            latency=options.pages_latency,
        ),
        host_seconds=options.host,
        attention_cost=attention_cost(
            domain.attention.model.config,
            workers[-1].roles.attention.platform,
            workers[-1].deployment.scheduler.token_budget,
        ),
        jitter=jitter(options),
        seed=options.seed,
        losses=tuple(Loss(worker=name, at=at, seconds=away) for name, at, away in options.lose),
    )
    times = [one.rooflines(_read_loads(options, one)) for one in workers]
    simulation = FleetSimulation(deployment, traffic, conditions, *times)
    return simulation, traffic, conditions


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
    return scenario(made, calculator.model, roles, context, assumed, measured)
