"""`plan deploy`: its options, and the plan of a whole deployment. Called by `plan.py`.

With `--write` it writes the deployment file, and with `--simulate` it runs that file in simulated
time (`simulation.py`), by the `plan simulate` command that it prints.
"""

import argparse
import shlex
import sys
from pathlib import Path

import numpy as np

from jaxserve.config.auto import page_tokens
from jaxserve.config.load import load_deployment
from jaxserve.config.shipped import CONFIGS
from jaxserve.errors import ConfigError
from jaxserve.fleet.simulation_command import add_fleet, read_simulation
from jaxserve.planner import deploy_view
from jaxserve.planner.advice import why_not
from jaxserve.planner.assumptions import Formats
from jaxserve.planner.deploy import Asked, Deployment, Hosts, NoUnitError, Planned, Sizer
from jaxserve.planner.deploy_demand import Demand, Level, level
from jaxserve.planner.deploy_file import Named, Writer
from jaxserve.planner.deploy_fleet import Times
from jaxserve.planner.deploy_spares import spares
from jaxserve.planner.deploy_view import Shown, Simulated
from jaxserve.planner.hardware import Hardware
from jaxserve.planner.layouts import Target
from jaxserve.planner.measurements import read_calibration
from jaxserve.planner.models import load_model, model_config, model_folder
from jaxserve.planner.quantities import assumptions, seconds, tokens
from jaxserve.planner.search import Searcher
from jaxserve.planner.search_options import (
    add_formats,
    count,
    positions,
    price_lines,
    read_acceptance,
    read_formats,
    read_hardware,
)
from jaxserve.planner.search_view import MODES
from jaxserve.planner.simulate_command import add_simulate
from jaxserve.planner.skew import read_skew
from jaxserve.planner.stages import Calculator
from jaxserve.planner.text import json_text

UNLIMITED = 2**22
"""Positions of a model that does not say how many it has."""
MOST_SIMULATED = 2 * 10**7
"""Tokens of a simulation: some minutes."""
COUNTED = 500
"""Requests of a simulation that count, at least."""


def add_deploy(command: argparse.ArgumentParser) -> None:
    """The options."""
    add = command.add_argument
    add("--model", required=True, help="a known model, or a model folder")
    add("--hardware", nargs="+", metavar="NAME", help="of all roles, any mix")
    for role in ("prefill", "attention", "ffn"):
        add(f"--{role}-hardware", nargs="+", metavar="NAME", help=f"of the {role} role alone")
    add("--rate", type=float, required=True, help="requests a second, at random")
    add("--prompts", required=True, help="tokens, on the mean, as 2048 or 2K")
    add("--outputs", required=True, help="tokens, on the mean")
    add("--spread", type=float, default=0.5, help="of both, standard deviation over mean: 0.5")
    add("--prefix-hits", type=float, default=0.0, help="part of prompts in a prefix cache: 0")
    add("--ttft", required=True, metavar="pN=TIME", help="time to the first token, as p95=2s")
    add("--tpot", required=True, metavar="pN=TIME", help="time per output token, as p95=50ms")
    add("--max-devices", type=count, default=64, help="of a prefill worker, of a unit: 64")
    add("--prefill-devices", type=count, default=0, help="of a prefill worker: these alone")
    add("--decode-devices", type=count, default=0, help="of a decode unit: these alone")
    add("--modes", nargs="+", choices=list(MODES), help="of decode units: all of them")
    add("--spares", type=int, default=0, help="servers of every role that stand by: 0")
    add("--failures", default="", metavar="EVERY:AWAY", help="of a server, as 1000h:12h: spares")
    add("--pages-latency", default="2ms", help="of a KV hand-off, beside its bytes: 2ms")
    add_formats(command)
    add("--write", type=Path, metavar="FILE", help="writes the deployment there")
    add("--simulate", action="store_true", help="what is written, in simulated time")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Plans, and shows."""
    _check(options)
    prefill, attention, ffn = read_hardware(
        options, options.prefill_hardware, options.attention_hardware, options.ffn_hardware
    )
    hardware = {**prefill, **attention, **ffn}
    formats = read_formats(options, hardware)
    asked = _asked(options, hardware, formats)
    requests = asked.demand.requests(asked.longest, asked.page)
    calculator = Calculator(
        load_model(options.model, options.configs),
        round(requests.context),
        formats,
        assumptions(options.assume),
        read_calibration(options.calibration, options.configs).of(Path(options.model).name),
    )
    skew = read_skew(options.skew) if options.skew is not None else None
    accepted = read_acceptance(options, calculator.model)
    searcher = Searcher(calculator, attention, ffn, accepted, skew)
    sizer = Sizer(calculator, searcher, Hosts(prefill, attention, ffn), asked, skew)
    try:
        planned = sizer.plan()
    except NoUnitError as error:
        target = asked.target
        print(f"error: {why_not(calculator, attention, ffn, target, error.found)}", file=sys.stderr)
        return 1
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    simulated, command = None, ""
    if options.write:
        planned = _write(options, sizer, searcher, planned, hardware)
        arguments = _simulation(options, asked, planned.best)
        command = "python -m jaxserve.plan " + shlex.join(arguments)
        if options.simulate:
            simulated = _simulate(arguments, asked)
    shown = Shown(
        title=f"{options.model}: {deploy_view.demand_text(asked)}",
        sizer=sizer,
        planned=planned,
        prices=price_lines(hardware, options.price),
        simulated=simulated,
        command=command,
    )
    if options.html:
        options.html.write_text(deploy_view.page(shown), encoding="utf-8")
    print(json_text(deploy_view.tree(shown)) if options.json else deploy_view.text(shown))
    return 0


def _check(options: argparse.Namespace) -> None:
    limits = {"rate": (1e-3, 1e6), "spread": (0.0, 3.0), "prefix_hits": (0.0, 0.99)}
    for name, (low, high) in limits.items():
        value = getattr(options, name)
        if not low <= value <= high:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} {value:g}: expected {low:g} to {high:g}")
    if options.simulate and not options.write:
        raise ConfigError("--simulate: without --write there is no deployment to simulate")
    if options.simulate and options.compute != "auto":
        raise ConfigError(f"--simulate: a deployment has no --compute {options.compute}; auto")
    if options.simulate and options.core != "auto":
        raise ConfigError(f"--simulate: a deployment has no --core {options.core}; auto")
    if options.simulate and options.drafts:
        raise ConfigError(
            f"--simulate: simulated fleets make no drafts (--drafts {options.drafts})"
        )


def _asked(options: argparse.Namespace, hardware: dict[str, Hardware], formats: Formats) -> Asked:
    prompt, output = tokens(options.prompts, "--prompts"), tokens(options.outputs, "--outputs")
    most = positions(options) or UNLIMITED
    if prompt + output > most:
        raise ConfigError(
            f"--prompts {options.prompts} and --outputs {options.outputs}: {options.model} has "
            f"{most} positions"
        )
    tpot = level(options.tpot, "--tpot")
    return Asked(
        demand=Demand(
            rate=options.rate,
            prompt=prompt,
            output=output,
            spread=options.spread,
            hits=options.prefix_hits,
        ),
        ttft=level(options.ttft, "--ttft"),
        tpot=tpot,
        positions=most,
        page=max(page_tokens(one.platform, formats.cache) for one in hardware.values()),
        target=Target(
            tpot=tpot.seconds,
            max_devices=max(options.max_devices, options.prefill_devices, options.decode_devices),
            modes=tuple(options.modes or MODES),
            most_drafts=options.drafts,
            shared_ranks=options.shared_ranks,
        ),
        spares=spares(options.spares, options.failures),
        pages_latency=seconds(options.pages_latency, "--pages-latency"),
        prefill_devices=options.prefill_devices,
        decode_devices=options.decode_devices,
    )


def _write(
    options: argparse.Namespace,
    sizer: Sizer,
    searcher: Searcher,
    planned: Planned,
    hardware: dict[str, Hardware],
) -> Planned:
    """Writes the best plan; with fewer slots than it had, it is sized once more."""
    folder = model_folder(options.model, options.configs)
    config = model_config(folder)
    if config is None:
        raise ConfigError(f"--write: the engine cannot run {options.model}, only plan it")
    names = {one.name: name for name, one in hardware.items()}
    cost = sizer.model
    named = Named(folder.resolve(), config, cost, hardware, names)
    writer = Writer(options.write, named, searcher, sizer.asked)
    requests = sizer.requests(sizer.asked.demand)
    best = planned.best
    slots = writer.write(best, requests)
    if slots < writer.slots(best):
        print(
            f"{options.write}: {slots} sequences a DP group and lane, not {writer.slots(best)}: "
            "with activations, as serve counts them, more do not fit",
            file=sys.stderr,
        )
        best = sizer.with_slots(best, slots)
        writer.write(best, requests)
    return Planned(best=best, others=planned.others, found=planned.found)


def _simulation(options: argparse.Namespace, asked: Asked, made: Deployment) -> list[str]:
    """The arguments of `plan` that simulate the file."""
    demand, found = asked.demand, made.prediction
    stay = found.ttft.mean + demand.output * (1 + demand.spread) * found.tpot.mean
    uncounted = round(1.5 * demand.rate * stay) + 20
    requests = 2 * uncounted + max(COUNTED, round(demand.rate * stay))
    arguments = ["simulate", "--config", str(options.write), "--rate", f"{demand.rate:g}"]
    arguments += ["--prompt", str(demand.prompt), "--output", str(demand.output)]
    arguments += ["--spread", f"{demand.spread:g}", "--prefix-hits", f"{demand.hits:g}"]
    arguments += ["--requests", str(requests), "--uncounted", str(uncounted)]
    arguments += ["--pages-latency", options.pages_latency]
    if len({one.name for one in made.fleet.unit.hardware}) > 1 or made.plan.layout.topology.has(
        "ffn"
    ):
        arguments += ["--attention-hardware", made.plan.layout.attention]
        arguments += ["--ffn-hardware", made.plan.layout.ffn]
    else:
        arguments += ["--hardware", made.plan.layout.attention]
    if options.skew is not None:
        arguments += ["--skew", options.skew, "--placed"]
    if options.assume:
        arguments += ["--assume", *options.assume]
    if options.calibration:
        arguments += ["--calibration", str(options.calibration)]
    if options.configs != CONFIGS:
        arguments += ["--configs", str(options.configs)]
    return arguments


def _simulate(arguments: list[str], asked: Asked) -> Simulated:
    """Runs the `plan simulate` command that the plan prints."""
    options = _simulate_parser().parse_args(arguments[1:])
    sizes = options.requests * int(options.output)
    if sizes > MOST_SIMULATED:
        raise ConfigError(
            f"--simulate: {options.requests} requests of {options.output} tokens, {sizes:.1e} in "
            f"all, are more than {MOST_SIMULATED:.0e}; simulate a smaller --rate"
        )
    ready = read_simulation(options, load_deployment(options.config, options.set))
    result = ready.simulation.run()
    ttft, tpot = (np.array(each) for each in ready.simulation.samples())
    return Simulated(
        ttft=Times.of(ttft),
        tpot=Times.of(tpot),
        ttft_asked=_at(ttft, asked.ttft),
        tpot_asked=_at(tpot, asked.tpot),
        busy=result.busy,
        refused=result.refused,
        requests=result.finished,
    )


def _simulate_parser() -> argparse.ArgumentParser:
    """Of `plan simulate`."""
    made = argparse.ArgumentParser()
    add_simulate(made)
    add_fleet(made)
    made.add_argument("--configs", type=Path, default=CONFIGS)
    return made


def _at(samples: np.ndarray, asked: Level) -> float:
    return float(np.percentile(samples, asked.percent))
