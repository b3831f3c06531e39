"""The command-line options that name a deployment and the hardware under it.

Called by the commands of `plan.py` that start from a deployment file.
"""

import argparse
from pathlib import Path

from jaxserve.config.deployment import Deployment
from jaxserve.config.load import load_deployment
from jaxserve.errors import ConfigError
from jaxserve.planner.hardware import load_hardware
from jaxserve.planner.measurements import read_calibration
from jaxserve.planner.quantities import assumptions
from jaxserve.planner.scenario import Roles, Scenario, model_of, scenario


def add_deployment(command: argparse.ArgumentParser) -> None:
    """Adds the options that name a deployment."""
    command.add_argument("--config", type=Path, metavar="FILE", help="a deployment, as of serve")
    command.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a key of it, e.g. lanes=3"
    )


def add_scenario(command: argparse.ArgumentParser) -> None:
    """Adds the options that name a deployment, its hardware, assumptions and measurements."""
    add_deployment(command)
    add = command.add_argument
    add("--hardware", metavar="NAME", help="of both roles; what the deployment names")
    add("--attention-hardware", metavar="NAME", help="of the attention role alone")
    add("--ffn-hardware", metavar="NAME", help="of the ffn role alone")
    add("--assume", nargs="+", default=[], metavar="NAME=VALUE", help="or `paper`; see the README")
    add("--calibration", type=Path, metavar="FILE", help="measured stages, from `calibrate`")


def read_deployment(options: argparse.Namespace) -> Deployment:
    """The deployment that the options name.

    Raises:
      ConfigError: there is none, or it is wrong.
    """
    if options.config is None:
        raise ConfigError("--config is missing: a deployment file, as search --write makes one")
    return load_deployment(options.config, options.set)


def read_roles(options: argparse.Namespace, deployment: Deployment | None = None) -> Roles:
    """The hardware of both roles; where no option names it, that of the deployment.

    Raises:
      ConfigError: a role has none, or nobody knows it.
    """
    names = []
    own = ("", "")
    if deployment is not None:
        named = deployment.attention.hardware
        own = named, deployment.ffn.hardware or named
    for given, told in zip((options.attention_hardware, options.ffn_hardware), own, strict=True):
        name = given or options.hardware or told
        if not name:
            raise ConfigError("--hardware is missing, or one of the roles has none")
        names.append(name if name.endswith(".yaml") else name.lower())
    attention, ffn = (load_hardware(name, None, options.configs) for name in names)
    return Roles(attention, ffn, (names[0], names[1]))


def read_scenario(options: argparse.Namespace, context: int) -> Scenario:
    """Reads the options of `add_scenario`.

    Raises:
      ConfigError: one of them is wrong.
    """
    deployment = read_deployment(options)
    model, stored = model_of(deployment, options.configs)
    measured = read_calibration(options.calibration, options.configs)
    assumed = assumptions(options.assume)
    roles = read_roles(options, deployment)
    return scenario(deployment, model, stored, roles, context, assumed, measured)
