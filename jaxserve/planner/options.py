"""Options of the `plan` commands: `commands.yaml` lists them, `READERS` read their texts, and the
functions below make hardware, searches and scenarios of them.

Readers of a single option raise ArgumentTypeError; `Parser` adds the option's name.
"""

import argparse
import contextlib
import importlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import yaml

from jaxserve.config.deployment import Deployment
from jaxserve.config.load import load_deployment
from jaxserve.config.model import ModelConfig
from jaxserve.config.shipped import CONFIGS
from jaxserve.config.topology import PlannedMode
from jaxserve.errors import ConfigError
from jaxserve.observe.spans import STAGES
from jaxserve.planner.assumptions import PLANNED, Assumptions, Formats, measured_speed
from jaxserve.planner.demand import Level
from jaxserve.planner.hardware import MONTH, Hardware, load_hardware
from jaxserve.planner.layouts import MODES, Target
from jaxserve.planner.measurements import read_calibration
from jaxserve.planner.models import load_model, model_config, model_folder
from jaxserve.planner.noise import Jitter, read_skew
from jaxserve.planner.scenario import Roles, Scenario, model_of, scenario
from jaxserve.planner.search import Searcher
from jaxserve.planner.stages import Calculator
from jaxserve.roles.layout import Bucket

TABLE: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_name("commands.yaml").read_text(encoding="utf-8")
)
LEAST = 1e-9
"""Stands for 0 where a number has to be above it."""


class Parser(argparse.ArgumentParser):
    """Raises what is wrong with a command line, instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        """Names the option and its text first, as every other error does."""
        message = re.sub(r"^argument (--[\w-]+): (?=['\"])", r"\1 ", message)
        raise ConfigError(message.removeprefix("argument "))


def reader(form: str, expected: str, made: Callable[..., Any]) -> Callable[[str], Any]:
    """Returns a reader of texts that have a form, but for spaces around it. It makes a value of the
    groups' texts, which it may refuse by a ValueError; the error asks for what is `expected`."""

    def read(text: str) -> Any:
        match = re.fullmatch(rf"\s*{form}\s*", text, re.ASCII)
        with contextlib.suppress(ValueError, argparse.ArgumentTypeError):
            if match:
                return made(*match.groups())
        raise argparse.ArgumentTypeError(f"{text!r}: expected {expected}")

    return read


def within[T: float](low: float, value: T, high: float) -> T:
    """Returns a value from `low` to `high`; raises ValueError for any other one."""
    if not low <= value <= high:
        raise ValueError
    return value


def number(low: float, high: float, kind: Callable[[str], float] = int) -> Callable[[str], float]:
    """Returns a reader of numbers in a range that includes both ends."""
    return reader("(.*)", f"{low:g} to {high:g}", lambda text: within(low, kind(text), high))


SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "": 1e-3}
"""Seconds of a unit; a bare number is in milliseconds."""
READERS: dict[str, Callable[[str], Any]] = {}
"""Readers of options' texts."""
MADE: dict[str, Callable[..., Any]] = {
    "address": lambda host, port: (host or "127.0.0.1", within(1, int(port), 65535)),
    "bucket": lambda rows, pages: Bucket(int(rows), int(pages)),
    "failures": lambda every, away: (float(every), within(LEAST, float(away), float(every))),
    "level": lambda percent, time: Level(
        within(50, float(percent or 95), 99.9), READERS["seconds"](time)
    ),
    "loss": lambda worker, at, away: (worker, READERS["seconds"](at), READERS["seconds"](away)),
    "mix": lambda *names: "+".join(filter(None, names)).lower(),
    "price": lambda name, usd: (name.strip().lower(), within(LEAST, float(usd), 1e6)),
    "seconds": lambda time, unit: within(LEAST, float(time) * SECONDS[unit], 1e9),
    "setting": lambda name, text: {name: json.loads(text)},
    "spread": lambda name, size: dict.fromkeys(
        (name,) if name else STAGES, within(0, float(size), 10)
    ),
    "tokens": lambda count, kilo: within(1, int(count) * (1024 if kilo else 1), 2**24),
}
"""Values of texts in the forms that `commands.yaml` has under `readers`."""
for _name, _made in MADE.items():
    _form, _expected = TABLE["readers"][_name]
    _form = _form.replace("STAGES", "|".join(STAGES))
    READERS[_name] = reader(_form, _expected.replace("STAGES", ", ".join(STAGES)), _made)
price, seconds, spread, tokens = map(READERS.__getitem__, ("price", "seconds", "spread", "tokens"))
READERS |= {"path": Path, "shared": lambda text: 0 if text == "0" else tokens(text)}
NAMES: dict[str, Sequence[str]] = {
    "formats": PLANNED,
    "modes": tuple(MODES),
    "products": ("auto", *PLANNED),
}
"""Lists of names that it may name."""


def add_command(parser: argparse.ArgumentParser, name: str) -> None:
    """Adds the options of a command to its parser; `run` of the parsed options runs it."""
    command = TABLE["commands"][name]
    shared = {each: TABLE["shared"][each] for each in (*command.get("shared", ()), "json", "html")}
    needs: dict[str, str] = {}
    for option, told in {**shared, **command.get("options", {})}.items():
        keywords = {**told, "help": told["help"].replace("%", "%%")}
        if "read" in keywords:
            keywords["type"] = READERS[keywords.pop("read")]
        if "range" in keywords:
            low, high = keywords.pop("range")
            keywords["type"] = number(low, high, type(low))
        if "among" in keywords:
            keywords["choices"] = NAMES[keywords.pop("among")]
        if "needs" in keywords:
            needs[option] = keywords.pop("needs")
        parser.add_argument(f"--{option.removeprefix('role-')}", **keywords)
    folder = "folder with models/ and hardware/"
    parser.add_argument("--configs", type=Path, default=CONFIGS, help=folder)
    module, _, function = command["run"].partition(":")

    def run(options: argparse.Namespace) -> Any:
        """Imports and runs the command; raises ConfigError if an option needs another one."""
        given = vars(options)
        for option, other in needs.items():
            name = option.replace("-", "_")
            if given[name] != parser.get_default(name) and not given[other]:
                raise ConfigError(f"--{option} needs --{other}")
        return getattr(importlib.import_module(module), function)(options)

    parser.set_defaults(run=run)


def jitter(options: argparse.Namespace) -> Jitter:
    """Reads `--jitter`."""
    return Jitter(spread={stage: size for one in options.jitter for stage, size in one.items()})


def assumptions(items: Sequence[str]) -> Assumptions:
    """Reads `compute=0.8`, `broadcast=true`. `paper` and `published` stand for what `commands.yaml`
    says of them; `slow` makes whatever the others say as slow as the tenth of published systems
    that was slowest beside its prediction. Raises ConfigError for an unknown name (lists the known
    ones) or a value out of range."""
    named: dict[str, dict[str, Any]] = TABLE["assumed"]
    chosen = [named[item] for item in items if item in named]
    tree = msgspec.to_builtins(Assumptions()) | (chosen[-1] if chosen else {})
    for item in (item for item in items if item not in (*named, "slow")):
        name, equals, text = item.partition("=")
        if not equals or name not in tree:
            raise ConfigError(
                f"--assume {item!r}: expected one of {', '.join(tree)}, as in compute=0.8"
            )
        tree[name] = text
    try:
        made = msgspec.convert(tree, Assumptions, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--assume: {error}") from None
    return made.at(measured_speed().systems.p10) if "slow" in items else made


def acceptance(text: str, most: int) -> tuple[float, ...]:
    """Reads `0.9`, or a share for each of `most` drafts: `0.9,0.7`; raises ConfigError."""
    try:
        shares = tuple(within(0, float(part), 1) for part in text.split(","))
    except ValueError:
        told = f"--acceptance {text!r}: expected shares from 0 to 1, as in 0.9,0.7"
        raise ConfigError(told) from None
    shares *= most if len(shares) == 1 else 1
    if len(shares) < most:
        raise ConfigError(f"--acceptance {text!r}: {len(shares)} shares for {most} drafts")
    return shares


def read_hardware(
    options: argparse.Namespace, *roles: Sequence[str] | None
) -> list[dict[str, Hardware]]:
    """Returns each role's hardware by name: of its own option, or (None) of `--hardware`. Raises
    ConfigError if a role has none, a name is unknown, or a price is of none of them."""
    found = []
    for given in roles:
        names = given or options.hardware
        if not names:
            raise ConfigError("--hardware is missing, or one of the roles has none")
        each = [name for text in names for name in text.lower().split(",") if name]
        found.append({n: load_hardware(n, dict(options.price), options.configs) for n in each})
    check_prices(options, {name for role in found for name in role})
    return found


def check_prices(options: argparse.Namespace, used: Collection[str]) -> None:
    """Raises ConfigError if `--price` names hardware that is not used."""
    if idle := sorted({name for name, _ in options.price} - set(used)):
        raise ConfigError(f"--price {idle[0]}: not among the hardware: {', '.join(sorted(used))}")


def price_lines(
    hardware: Mapping[str, Hardware], own: Iterable[tuple[str, float]] = ()
) -> list[str]:
    """Returns a line for the price of each, with its source; `--price` gives `own` prices."""
    given, lines = dict(own), []
    for name, one in sorted(hardware.items()):
        source = "given by --price" if name in given else one.sources["price"]
        if name not in given and "not verified" not in source:
            source += "; not verified"
        chip = one.price * one.jax_devices
        month = f"{chip * MONTH:,.0f} a month of {MONTH:g} hours"
        lines.append(f"price of {name}: {chip:g} USD an accelerator and hour, {month} ({source})")
    return lines


def read_formats(options: argparse.Namespace, hardware: Mapping[str, Hardware]) -> Formats:
    """Returns the number formats; the default is FP8, or INT8 if some of the hardware has no FP8;
    of a cache with states or compressed rows, which the engine keeps in no 8 bits, BF16. Raises
    ConfigError if FP8 is asked of hardware that has none."""
    config = model_config(model_folder(options.model, options.configs))
    plain = any(spec.rows_a_token < 1 for spec in config.attentions())
    without = [name for name, each in hardware.items() if not each.stores("fp8")]
    asked = {name: getattr(options, name) for name in ("combine", "compute", "core")}
    for name in ("weights", "cache", "dispatch"):
        smallest = "int8" if without else "fp8"
        asked[name] = getattr(options, name) or smallest
        if name == "cache" and plain:
            asked[name] = options.cache or "bfloat16"
        if asked[name] == "fp8" and without:
            raise ConfigError(f"--{name} fp8: {', '.join(without)} has no FP8; int8 or bfloat16")
    return Formats(**asked)


def read_searcher(
    options: argparse.Namespace,
    attention: Mapping[str, Hardware],
    ffn: Mapping[str, Hardware],
    context: int,
    formats: Formats,
) -> Searcher:
    """Returns a search for layouts of `--model` at a mean context. Raises ConfigError if an option
    is wrong, or drafts are asked of a model without a module for them."""
    measured = read_calibration(options.calibration, options.configs)
    model = load_model(options.model, options.configs)
    if options.drafts and not model.modules:
        raise ConfigError(
            f"--drafts {options.drafts}: {options.model} has no multi-token-prediction module"
        )
    calculator = Calculator(model, context, formats, assumptions(options.assume), measured)
    accepted = acceptance(options.acceptance, options.drafts) if options.drafts else ()
    skew = read_skew(options.skew) if options.skew is not None else None
    return Searcher(calculator, attention, ffn, accepted, skew)


def read_target(options: argparse.Namespace, tpot: float, modes: Sequence[PlannedMode]) -> Target:
    """Returns the target of a search within `tpot` seconds."""
    return Target(
        tpot=tpot,
        max_devices=options.max_devices,
        modes=tuple(modes),
        most_drafts=options.drafts,
        shared_ranks=options.shared_ranks,
    )


def check_positions(model: str, configs: Path, **tokens: int) -> ModelConfig:
    """Returns a model; raises ConfigError if it has fewer positions than these tokens."""
    config = model_config(model_folder(model, configs))
    if sum(tokens.values()) > (most := config.max_positions):
        told = " and ".join(f"--{option} {count}" for option, count in tokens.items())
        raise ConfigError(f"{told}: {model} has {most} positions")
    return config


def read_deployment(options: argparse.Namespace) -> Deployment:
    """Returns the deployment of `--config`; raises ConfigError if it is missing or wrong."""
    if options.config is None:
        raise ConfigError("--config is missing: a deployment file, as search --write makes one")
    return load_deployment(options.config, options.set)


def read_scenario(options: argparse.Namespace, context: int) -> Scenario:
    """Reads the options of a deployment and its hardware, which it may name; raises ConfigError."""
    deployment = read_deployment(options)
    model = model_of(deployment, options.configs)
    measured = read_calibration(options.calibration, options.configs)
    assumed, named = assumptions(options.assume), deployment.attention.hardware
    names = []
    for given, own in (
        (options.attention_hardware, named),
        (options.ffn_hardware, deployment.ffn.hardware or named),
    ):
        name = given or options.hardware or own
        if not name:
            raise ConfigError("--hardware is missing, or one of the roles has none")
        names.append(name if name.endswith(".yaml") else name.lower())
    attention, ffn = (load_hardware(name, None, options.configs) for name in names)
    roles = Roles(attention, ffn, (names[0], names[1]))
    return scenario(deployment, model, roles, context, assumed, measured)
