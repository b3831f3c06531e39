"""`plan deploy`: its options, and the plan of a whole deployment. Called by `plan.py`.

With `--write` it writes the deployment file, and with `--simulate` it runs that file in simulated
time (`simulation.py`), by the `plan simulate` command that it prints.
"""

import argparse
import shlex
import sys
from collections.abc import Mapping

import msgspec

from jaxserve.config.auto import page_tokens
from jaxserve.config.load import load_deployment
from jaxserve.config.shipped import CONFIGS
from jaxserve.errors import ConfigError
from jaxserve.fleet.planned_fleet import prediction, simulated
from jaxserve.fleet.simulation_command import read_simulation
from jaxserve.planner.advice import why_not
from jaxserve.planner.assumptions import Formats
from jaxserve.planner.deploy import (
    Asked,
    Deployment,
    Hosts,
    NoUnitError,
    Planned,
    Prediction,
    Sizer,
    Trial,
)
from jaxserve.planner.deploy_demand import Demand, Spares
from jaxserve.planner.deploy_view import Shown, deploy_report
from jaxserve.planner.deployment_file import FleetFile, plan_file
from jaxserve.planner.hardware import Hardware
from jaxserve.planner.layouts import Target
from jaxserve.planner.options import (
    Parser,
    add_command,
    positions,
    price_lines,
    read_formats,
    read_hardware,
    read_searcher,
)
from jaxserve.planner.simulate import Progress
from jaxserve.planner.view import show

UNLIMITED = 2**22
"""Positions of a model whose description does not say how many it has."""
COUNTED, LEAST_COUNTED, TOKENS = 500, 100, 500_000
"""Requests of the file's simulation that count, fewer where outputs are long, but not below a
number; and output tokens from which they are fewer: some seconds."""


def run(options: argparse.Namespace) -> int:
    """Plans, and shows."""
    _check(options)
    prefill, attention, ffn = read_hardware(
        options, options.prefill_hardware, options.attention_hardware, options.ffn_hardware
    )
    hardware = {**prefill, **attention, **ffn}
    formats = read_formats(options, hardware)
    asked = _asked(options, hardware, formats)
    context = round(asked.demand.requests(asked.longest, asked.page).context)
    searcher = read_searcher(options, attention, ffn, context, formats)
    request_seconds = searcher.calculator.assumed.request_seconds

    def simulate(trial: Trial) -> Prediction:
        tell(lambda: f"simulates {trial.fleet.text} ({trial.part})")
        return simulated(trial, request_seconds)

    tell = Progress()
    sizer = Sizer(searcher, Hosts(prefill, attention, ffn), asked, simulate)
    try:
        planned = sizer.plan()
    except NoUnitError as error:
        print(f"error: {why_not(searcher, asked.target, error.found)}", file=sys.stderr)
        return 1
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    file_simulated, command = None, ""
    if options.write:
        planned = _write(options, sizer, planned, hardware)
        arguments = _simulation(options, asked, planned.best)
        command = "python -m jaxserve.plan " + shlex.join(arguments)
        if options.simulate:
            file_simulated = _simulate(arguments, asked)
    prices = price_lines(hardware, options.price)
    title = f"{options.model}: {asked.text}"
    show(options, deploy_report(Shown(title, sizer, planned, prices, file_simulated, command)))
    return 0


def _check(options: argparse.Namespace) -> None:
    if not options.simulate:
        return
    if not options.write:
        raise ConfigError("--simulate: without --write there is no deployment to simulate")
    for name in ("compute", "core"):
        if (value := getattr(options, name)) != "auto":
            raise ConfigError(f"--simulate: a deployment has no --{name} {value}; auto")
    if options.drafts:
        raise ConfigError(
            f"--simulate: simulated fleets make no drafts (--drafts {options.drafts})"
        )


def _asked(
    options: argparse.Namespace, hardware: Mapping[str, Hardware], formats: Formats
) -> Asked:
    most = positions(options.model, options.configs) or UNLIMITED
    if options.prompts + options.outputs > most:
        raise ConfigError(
            f"--prompts {options.prompts} and --outputs {options.outputs}: {options.model} has "
            f"{most} positions"
        )
    between, repair = options.failures
    return Asked(
        demand=Demand(
            rate=options.rate,
            prompt=options.prompts,
            output=options.outputs,
            spread=options.spread,
            hits=options.prefix_hits,
        ),
        ttft=options.ttft,
        tpot=options.tpot,
        positions=most,
        page=max(page_tokens(one.platform, formats.cache) for one in hardware.values()),
        target=Target(
            tpot=options.tpot.seconds,
            max_devices=max(options.max_devices, options.prefill_devices, options.decode_devices),
            modes=tuple(options.modes),
            most_drafts=options.drafts,
            shared_ranks=options.shared_ranks,
        ),
        spares=Spares(count=options.spares, between=between, repair=repair),
        pages_latency=options.pages_latency,
        prefill_devices=options.prefill_devices,
        decode_devices=options.decode_devices,
    )


def _write(
    options: argparse.Namespace, sizer: Sizer, planned: Planned, hardware: Mapping[str, Hardware]
) -> Planned:
    """Writes the best plan; with fewer slots than it had, it is sized once more."""
    file = plan_file(options, hardware)
    fleet = FleetFile(file, sizer.model, sizer.searcher.calculator, sizer.asked)
    requests, best = sizer.requests(sizer.asked.demand), planned.best
    slots = fleet.write(best, requests)
    if slots < best.fleet.slots:
        best = sizer.with_slots(best, slots)
        fleet.write(best, requests)
    return msgspec.structs.replace(planned, best=best)


def _simulation(options: argparse.Namespace, asked: Asked, made: Deployment) -> list[str]:
    """Returns the arguments of `plan` that simulate the file, in the middle of things."""
    demand, fleet, layout = asked.demand, made.fleet, made.plan.layout
    uncounted = 2 * fleet.workers * fleet.worker.layout.dp + 20
    values = {
        "config": options.write,
        "rate": f"{demand.rate:g}",
        "prompt": demand.prompt,
        "output": demand.output,
        "spread": f"{demand.spread:g}",
        "prefix-hits": f"{demand.hits:g}",
        "requests": uncounted + max(LEAST_COUNTED, min(COUNTED, TOKENS // demand.output)),
        "uncounted": uncounted,
        "running": max(1, round(fleet.sequences)),
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


def _simulate(arguments: list[str], asked: Asked) -> Prediction:
    """Runs the `plan simulate` command that the plan prints."""
    parser = Parser()
    add_command(parser, "simulate")
    options = parser.parse_args(arguments[1:])
    ready = read_simulation(options, load_deployment(options.config, options.set))
    return prediction(ready.simulation, asked)
