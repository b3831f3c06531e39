"""What the options of `plan search` and `plan deploy` have in common: hardware with its prices,
number formats, drafts, and the model's positions. Called by `plan.py` and
`fleet/deploy_command.py`."""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from jaxserve.errors import ConfigError
from jaxserve.planner.assumptions import PLANNED, Formats
from jaxserve.planner.drafts import NO_DRAFTS, Acceptance, acceptance
from jaxserve.planner.hardware import Hardware, load_hardware
from jaxserve.planner.models import CostModel, model_config, model_folder
from jaxserve.planner.quantities import prices

MONTH = 730.0
"""Hours of a month, for what is paid by the hour."""


def add_formats(command: argparse.ArgumentParser) -> None:
    """Adds number formats, drafts, prices, assumptions and measurements."""
    add = command.add_argument
    formats = PLANNED
    for name in ("weights", "cache", "dispatch"):
        add(f"--{name}", choices=formats, help="number format: fp8, or int8 where there is none")
    add("--combine", choices=("auto", "int8"), default="auto", help="of results: as rows, int8")
    add("--drafts", type=_drafts, default=0, help="of a module, a step: the most to try: 0")
    add("--skew", help="of the experts' popularity, as of simulate: places them, with replicas")
    add("--shared-ranks", action="store_true", help="tries some for the shared expert alone")
    add("--acceptance", default="0.85", help="of drafts: 0.85 each, or one each, as 0.9,0.7")
    add("--compute", choices=("auto", *formats), default="auto", help="of matrix products")
    add("--core", choices=("auto", *formats), default="auto", help="of attention's own products")
    add("--price", nargs="+", default=[], metavar="NAME=USD", help="a device and hour")
    add("--assume", nargs="+", default=[], metavar="NAME=VALUE", help="or `paper`; see the README")
    add("--calibration", type=Path, metavar="FILE", help="measured stages, from `calibrate`")


def count(text: str) -> int:
    """A number of devices or plans."""
    if not text.isdecimal() or not 1 <= int(text) <= 4096:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to 4096")
    return int(text)


def _drafts(text: str) -> int:
    if not text.isdecimal() or not 0 <= int(text) <= 8:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to 8")
    return int(text)


def read_hardware(
    options: argparse.Namespace, *roles: Sequence[str] | None
) -> list[dict[str, Hardware]]:
    """The hardware that each role may use, by name.

    Args:
      roles: what the option of each says; None: what `--hardware` says.

    Raises:
      ConfigError: a role has none, a name is unknown, or a price is of none of them.
    """
    own = prices(options.price)
    found = []
    for given in roles:
        names = given or options.hardware
        if not names:
            raise ConfigError("--hardware is missing, or one of the roles has none")
        each = [name for text in names for name in text.lower().split(",") if name]
        found.append({name: load_hardware(name, own, options.configs) for name in each})
    used = {name for role in found for name in role}
    if idle := sorted(set(own) - used):
        raise ConfigError(f"--price {idle[0]}: not among the hardware: {', '.join(sorted(used))}")
    return found


def price_lines(hardware: Mapping[str, Hardware], own: Iterable[str] = ()) -> list[str]:
    """What each costs, and who says so.

    Args:
      hardware: by name.
      own: names whose prices were given.
    """
    given = {item.partition("=")[0].strip().lower() for item in own}
    lines = []
    for name, one in sorted(hardware.items()):
        source = "given by --price" if name in given else one.sources["price"]
        if name not in given and "not verified" not in source:
            source += "; not verified"
        chip = one.price * one.jax_devices
        month = f"{chip * MONTH:,.0f} a month of {MONTH:g} hours"
        lines.append(f"price of {name}: {chip:g} USD an accelerator and hour, {month} ({source})")
    return lines


def read_formats(options: argparse.Namespace, hardware: Mapping[str, Hardware]) -> Formats:
    """The number formats; what is not given is FP8, or INT8 if some of the hardware has no FP8.

    Raises:
      ConfigError: FP8 is asked of hardware that has none.
    """
    without = [name for name, each in hardware.items() if not each.stores("fp8")]
    asked = {name: getattr(options, name) for name in ("weights", "cache", "dispatch")}
    for name, value in asked.items():
        if value == "fp8" and without:
            raise ConfigError(f"--{name} fp8: {', '.join(without)} has no FP8; int8 or bfloat16")
        asked[name] = value or ("int8" if without else "fp8")
    asked["combine"] = options.combine
    return Formats(**asked, compute=options.compute, core=options.core)


def read_acceptance(options: argparse.Namespace, model: CostModel) -> Acceptance:
    """Of drafts, if any are to be tried.

    Raises:
      ConfigError: the model has no module for them.
    """
    if not options.drafts:
        return NO_DRAFTS
    if not model.mtp_layers:
        raise ConfigError(
            f"--drafts {options.drafts}: {options.model} has no multi-token-prediction module"
        )
    return acceptance(options.acceptance, options.drafts)


def positions(options: argparse.Namespace) -> int | None:
    """The positions that the model has; None: nobody says."""
    config = model_config(model_folder(options.model, options.configs))
    return None if config is None else config.max_positions


def check_context(options: argparse.Namespace, tokens: int) -> None:
    """Refuses a context that the model has no positions for."""
    most = positions(options)
    if most is not None and tokens > most:
        raise ConfigError(f"--context {options.context}: {options.model} has {most} positions")
