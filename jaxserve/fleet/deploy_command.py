"""`plan deploy`: its options, and the plan of a whole deployment. Called by `plan.py`.

Every fleet that the sizer asks about runs in simulated time (`simulated`), with the same lengths
and the same gaps between requests, so that two plans differ by what they are and not by chance. Of
a large fleet a part is run, with its part of the requests: the router balances over a few workers
nearly as well as over many. With `--write` the deployment file is written, and `--simulate` runs
that file by the `plan simulate` command that is printed.
"""

import argparse
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from jaxserve.config.auto import page_tokens
from jaxserve.config.load import load_deployment
from jaxserve.config.shipped import CONFIGS
from jaxserve.errors import ConfigError
from jaxserve.fleet.simulation import FleetConditions, FleetSimulation, FleetTraffic
from jaxserve.fleet.simulation_command import read_simulation
from jaxserve.planner.assumptions import Formats
from jaxserve.planner.demand import Demand, Spares
from jaxserve.planner.deploy import Sizer
from jaxserve.planner.deploy_fleet import (
    UNIT_CHUNK,
    Asked,
    DeployedPart,
    Fleet,
    FleetPlan,
    Planned,
    Scaled,
)
from jaxserve.planner.deployment_file import plan_file, write_fleet
from jaxserve.planner.hardware import Hardware
from jaxserve.planner.options import (
    Parser,
    add_command,
    check_positions,
    price_lines,
    read_formats,
    read_hardware,
    read_searcher,
    read_target,
)
from jaxserve.planner.results import FleetResult
from jaxserve.planner.search_view import deploy_report
from jaxserve.planner.simulate import Constant, Progress
from jaxserve.planner.stage_times import StageTimes
from jaxserve.planner.view import show

COUNTED, LEAST_COUNTED, TOKENS, STEPS = 500, 50, 500_000, 30_000
"""Requests of the simulation of a fleet and of its file that count, but not fewer than a number;
output tokens, and steps of the units, from which they are fewer: some seconds."""
SIZING, SIZING_STEPS, LEAST = 300, 1_500, 50
"""The same of prefill workers that are sized, five times as many for percentiles above 95."""
HORIZON, MOST_COUNTED = 2, 800
"""Times of the TTFT's target that requests for prefill workers come, at least, up to a number of
requests: where many come a second, a few hundred end before a queue has grown."""
GROUPS = 64
"""DP groups of the prefill workers that are simulated at most."""
SEQUENCES = 1024
"""Sequences that decode at a time in a simulation at most."""
ROUNDED = 0.02
"""Share by which workers for each unit may differ in the part of a fleet that is simulated."""
COARSE = 0.05
"""Part of the TTFT's target that a simulated step takes at most, where it stands for several."""
LEAST_TOKENS, LEAST_OUTPUT = 64, 16
"""Simulated tokens of a mean prompt, without those found, and of a mean output at least, where each
stands for several."""
COARSE_KEYS = {
    "cache.page_size",
    "scheduler.max_length",
    "prefill.scheduler.token_budget",
}
"""Keys that count tokens of sequences."""
PACED_SLOTS = 4096
PACED = {
    "mode": "colocated",
    "ffn.ep": None,
    "ffn.tp": None,
    "attention.dp": 1,
    "attention.tp": 1,
    "scheduler.slots": PACED_SLOTS,
    "scheduler.token_budget": PACED_SLOTS,
    "scheduler.token_buckets": [PACED_SLOTS],
}
"""Keys of a domain that keeps its pace whatever the batch; its pages follow from the requests."""
HOST_SECONDS = 1e-4
"""Time of the host at every step's end, as `plan simulate` has it."""


def run(options: argparse.Namespace) -> int:
    """Plans, and shows."""
    _check(options)
    sizer, hardware = read_sizer(options)
    asked = sizer.asked
    try:
        planned = sizer.plan()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    of_file, command = None, ""
    if options.write:
        planned = _write(options, sizer, planned, hardware)
        arguments = _simulation(options, sizer, planned.best)
        command = "python -m jaxserve.plan " + shlex.join(arguments)
        of_file = _simulate(arguments, asked) if options.simulate else None
    told = {"prices": price_lines(hardware, options.price), "of_file": of_file, "command": command}
    show(options, deploy_report(f"{options.model}: {asked.text}", sizer, planned, **told))
    return 0


def read_sizer(options: argparse.Namespace) -> tuple[Sizer, dict[str, Hardware]]:
    """Returns a sizer for what the options ask, and all hardware that it may use, by name.

    Raises:
      ConfigError: an option is wrong.
    """
    prefill, attention, ffn = read_hardware(
        options, options.prefill_hardware, options.attention_hardware, options.ffn_hardware
    )
    hardware = {**prefill, **attention, **ffn}
    formats = read_formats(options, hardware)
    asked = _asked(options, hardware, formats)
    context = round(asked.demand.requests(asked.longest, asked.page).context)
    searcher = read_searcher(options, attention, ffn, context, formats)
    tell = Progress()

    def simulate(sizer: Sizer, part: DeployedPart, fleet: Fleet) -> FleetResult:
        tell(lambda: f"simulates {fleet.text} ({part})")
        return simulated(sizer, part, fleet)

    return Sizer(searcher, prefill, asked, simulate), hardware


def simulated(sizer: Sizer, part: DeployedPart, fleet: Fleet) -> FleetResult:
    """Returns the times of a fleet's requests, or of those that come to a part of it."""
    from jaxserve.roles.sizing import attention_cost  # imports JAX

    asked, demand, requests, layout = sizer.asked, sizer.demand, sizer.requests, fleet.unit.layout
    workers, units = _part(fleet, part)
    share = workers / fleet.workers if part == "prefill" else units / fleet.units
    keys = fleet._replace(workers=workers).keys(asked, requests)
    coarse = _coarse(part, fleet, sizer)
    count, uncounted = _count(part, fleet, sizer)
    running: tuple[tuple[int, int], ...] = ()
    if part == "prefill":
        domain: StageTimes = Constant(1, 1, fleet.pace / layout.lanes)
        passing = max(LEAST, int(4 * demand.rate * share * fleet.pace))
        keys |= PACED | {"cache.pages": passing * (asked.longest // asked.page + 1)}
    else:
        if workers:
            length, left = requests.running(max(1, round(fleet.sequences * units / fleet.units)))
            left = np.maximum(1, left // coarse)
            running = tuple(zip((length // coarse).tolist(), left.tolist(), strict=True))
        drafts = fleet.unit.pace.drafts(max(1, round(fleet.taken)))
        keys["scheduler.token_ms"] *= coarse / fleet.unit.plan.tokens_a_step
        domain = Scaled(sizer.times(layout, fleet.unit.hardware), coarse, coarse, drafts)
    for key in COARSE_KEYS & keys.keys():
        keys[key] = max(1, keys[key] // coarse)
    if workers:
        budget = keys["prefill.scheduler.token_budget"]
        keys["prefill.scheduler.token_buckets"] = [budget // 4, budget]
    if keys["mode"] == "afd":
        keys["fleet.domains"] = [f"decode-{one}:1" for one in range(units)]
        if workers:
            keys["fleet.prefill"] = [f"prefill-{one}:1" for one in range(workers)]
    else:
        keys["domains"] = units
    on, link = fleet.worker.hardware, sizer.link(fleet)
    return FleetSimulation(
        load_deployment(Path(), {key: one for key, one in keys.items() if one is not None}),
        FleetTraffic(
            lengths=msgspec.structs.replace(
                demand.lengths(asked.longest // coarse),
                prompt=max(1, demand.prompt // coarse),
                output=1 if part == "prefill" else max(1, demand.output // coarse),
            ),
            rate=demand.rate * share,
            requests=count,
            warm_up=uncounted,
            cool_down=0 if running or part == "prefill" else uncounted,
            hits=demand.hits,
            running=running,
            percents=(asked.ttft.percent, asked.tpot.percent),
        ),
        FleetConditions(
            pages=msgspec.structs.replace(link, token_bytes=link.token_bytes * coarse),
            host_seconds=HOST_SECONDS,
            request_seconds=sizer.searcher.calculator.assumed.request_seconds,
            attention_cost=coarse
            * attention_cost(sizer.model.config, on.platform, fleet.worker.chunk),
            tokens_a_step=1 if part == "prefill" else coarse,
            step_seconds=coarse * fleet.pace,
        ),
        domain=domain,
        prefill=Scaled(sizer.times(fleet.worker.layout, (on, on)), coarse) if workers else None,
    ).run()


def _count(part: DeployedPart, fleet: Fleet, sizer: Sizer) -> tuple[int, int]:
    """Requests that are simulated, and the first ones that do not count; where units compute
    prompts, also the last. A whole fleet gets those of its file: with other lengths and gaps the
    TTFT of a plan and that of its file are 20 % apart."""
    if part == "whole":
        return _file_requests(sizer, fleet)
    asked, demand, requests = sizer.asked, sizer.demand, sizer.requests
    workers, _ = _part(fleet, part)
    counted = SIZING * (5 if max(asked.ttft.percent, asked.tpot.percent) > 95 else 1)
    groups = fleet.worker.layout.dp
    steps = requests.computed / fleet.worker.chunk
    counted = min(counted, max(LEAST, int(SIZING_STEPS / max(steps / min(groups, 4), 0.1))))
    rate = demand.rate * workers / fleet.workers
    horizon = int(HORIZON * asked.ttft.seconds * rate)
    uncounted = min(counted, 2 * workers * groups)
    return uncounted + max(counted, min(horizon, MOST_COUNTED)), uncounted


def _file_requests(sizer: Sizer, fleet: Fleet) -> tuple[int, int]:
    """The same of the file's simulation."""
    uncounted = 2 * fleet.workers * fleet.worker.layout.dp + 20
    counted = max(COUNTED, int(HORIZON * sizer.asked.ttft.seconds * sizer.demand.rate))
    steps_each = fleet.units / (sizer.demand.rate * fleet.pace)  # from one request to the next
    most = min(TOKENS / sizer.demand.output, STEPS / steps_each)
    ends = 1 if fleet.workers else 2
    return ends * uncounted + max(LEAST_COUNTED, min(counted, int(most))), uncounted


def _coarse(part: DeployedPart, fleet: Fleet, sizer: Sizer) -> int:
    """Returns how many tokens a simulated one stands for: a power of two that divides a page.

    Prompts keep some dozen tokens, so that their chunks end where they should, and outputs a dozen;
    where units compute prompts, as many as a chunk has. Where the domain's steps take part of the
    TTFT, they stay short beside its target.
    """
    asked = sizer.asked
    least = LEAST_TOKENS if fleet.workers else UNIT_CHUNK
    most = min(float(asked.page), sizer.requests.computed / least)
    if part == "whole":
        most = min(
            most, asked.demand.output / LEAST_OUTPUT, COARSE * asked.ttft.seconds / fleet.pace
        )
    return 1 << max(0, int(most).bit_length() - 1)


def _part(fleet: Fleet, part: DeployedPart) -> tuple[int, int]:
    """Workers and units that are simulated: as few as stand for the fleet, in its proportion."""
    groups, sequences = fleet.worker.layout.dp, fleet.sequences / fleet.units
    workers = min(fleet.workers, max(2, GROUPS // groups))
    if part == "prefill":
        return workers, max(1, round(fleet.units * workers / fleet.workers))
    units = min(fleet.units, max(1, int(SEQUENCES / sequences)))
    if not fleet.workers:
        return 0, units
    for count in range(units, fleet.units):
        exact = fleet.workers * count / fleet.units
        if round(exact) >= 1 and abs(round(exact) / exact - 1) <= ROUNDED:
            return round(exact), count
    return fleet.workers, fleet.units


def _check(options: argparse.Namespace) -> None:
    if not options.simulate:
        return
    for name in ("compute", "core"):
        if (value := getattr(options, name)) != "auto":
            raise ConfigError(f"--simulate: a deployment has no --{name} {value}; auto")
    if drafts := options.drafts:
        raise ConfigError(f"--simulate: simulated fleets make no drafts (--drafts {drafts})")


def _asked(
    options: argparse.Namespace, hardware: Mapping[str, Hardware], formats: Formats
) -> Asked:
    sizes = {"prompts": options.prompts, "outputs": options.outputs}
    config = check_positions(options.model, options.configs, **sizes)
    between, repair = options.failures
    demand = Demand(
        rate=options.rate,
        prompt=options.prompts,
        output=options.outputs,
        spread=options.spread,
        hits=options.prefix_hits,
    )
    alike = ("ttft", "tpot", "pages_latency", "prefill_devices", "decode_devices")
    target = read_target(options, options.tpot.seconds, options.modes)
    devices = max(options.max_devices, options.prefill_devices, options.decode_devices)
    return Asked(
        demand=demand,
        positions=config.max_positions,
        page=max(
            page_tokens(one.platform, formats.cache, config.page_unit) for one in hardware.values()
        ),
        target=msgspec.structs.replace(target, max_devices=devices),
        spares=Spares(count=options.spares, between=between, repair=repair),
        **{name: getattr(options, name) for name in alike},
    )


def _write(
    options: argparse.Namespace, sizer: Sizer, planned: Planned, hardware: Mapping[str, Hardware]
) -> Planned:
    """Writes the best plan; with fewer slots than it had, it is sized once more."""
    file, asked = plan_file(options, hardware, sizer.searcher.calculator), sizer.asked
    requests, best = sizer.requests, planned.best
    slots = write_fleet(file, asked, best, requests)
    if slots < best.fleet.slots:
        again = sizer.again(best, slots)
        if again is None:
            raise ConfigError(f"with {slots} sequences a DP group and lane the targets are missed")
        write_fleet(file, asked, best := again, requests)
    return msgspec.structs.replace(planned, best=best)


def _simulation(options: argparse.Namespace, sizer: Sizer, made: FleetPlan) -> list[str]:
    """Returns the arguments of `plan` that simulate the file, in the middle of things; where units
    compute prompts, from its start."""
    demand, fleet, layout = sizer.demand, made.fleet, made.fleet.unit.plan.layout
    count, uncounted = _file_requests(sizer, fleet)
    values = {
        "config": options.write,
        "rate": f"{demand.rate:g}",
        "prompt": demand.prompt,
        "output": demand.output,
        "spread": f"{demand.spread:g}",
        "prefix-hits": f"{demand.hits:g}",
        "requests": count,
        "uncounted": uncounted,
        "running": max(1, round(fleet.sequences)) if fleet.workers else 0,
        "pages-latency": f"{1e3 * options.pages_latency:g}ms",
    }
    if layout.topology.has("ffn"):
        values |= {"attention-hardware": layout.attention, "ffn-hardware": layout.ffn}
    else:
        values["hardware"] = layout.attention
    if options.calibration:
        values["calibration"] = options.calibration
    if options.configs != CONFIGS:
        values["configs"] = options.configs
    arguments = ["simulate"]
    for name, value in values.items():
        arguments += [f"--{name}", str(value)]
    if options.skew is not None:
        arguments += ["--skew", options.skew, "--placed"]
    return arguments + (["--assume", *options.assume] if options.assume else [])


def _simulate(arguments: list[str], asked: Asked) -> FleetResult:
    """Runs the `plan simulate` command that the plan prints."""
    parser = Parser()
    add_command(parser, "simulate")
    options = parser.parse_args(arguments[1:])
    deployment = load_deployment(options.config, options.set)
    percents = asked.ttft.percent, asked.tpot.percent
    return read_simulation(options, deployment, percents)[0].run()
