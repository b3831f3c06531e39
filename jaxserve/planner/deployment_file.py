"""Plans as deployment files that `serve --config` takes. Called by `plan search --write` and, with
prefill workers, the pages link, addresses and targets, by `plan deploy --write`.

Knows the keys of `config/deployment.py`, not how a plan came about. What `serve --check` would
refuse is written with fewer slots, or not at all.
"""

import argparse
import contextlib
import os
import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import yaml

from jaxserve.config.deployment import Deployment
from jaxserve.config.load import deployment_of, known_keys, load_deployment
from jaxserve.config.model import ModelConfig, platform_of
from jaxserve.config.shipped import device_kind, hardware_file
from jaxserve.errors import ConfigError
from jaxserve.planner.demand import Requests
from jaxserve.planner.deploy_fleet import Asked, FleetPlan
from jaxserve.planner.hardware import Hardware
from jaxserve.planner.layout_keys import Tree, layout_keys, sections, token_ms, usable
from jaxserve.planner.link_load import check_link
from jaxserve.planner.models import model_config, model_folder
from jaxserve.planner.search import Plan
from jaxserve.planner.stages import Calculator
from jaxserve.planner.view import declared

PORT = 9100
"""Where workers listen."""
PRECISION = 0.02
"""Share of a fleet's slots within which the most that `serve` takes is found."""


class PlanFile(NamedTuple):
    """A plan's file and model folder, all hardware by name, and what predicted it."""

    path: Path
    model: Path
    config: ModelConfig
    hardware: Mapping[str, Hardware]
    calculator: Calculator

    def write(self, text: str) -> None:
        """Writes a deployment. Raises ConfigError, with the numbers, if `serve` would refuse it: it
        does not fit on its devices, or takes more of the link between runtimes than that carries.
        """
        from jaxserve.roles.capacity import check_capacity, memory_of  # imports JAX
        from jaxserve.roles.pipelines import role_bytes

        self.path.write_text(text, encoding="utf-8")
        try:
            deployment = load_deployment(self.path)
            parts = [deployment]
            if deployment.prefill.workers:
                parts.append(deployment_of(deployment, "prefill"))
            for part in parts:
                check_capacity(self._loaded(deployment), part, memory_of(part), role_bytes)
            rate = self.calculator.assumed.pull_gb_s
            check_link(self._loaded(deployment), deployment, rate)
        except ConfigError:
            self.path.unlink()
            raise

    def _loaded(self, deployment: Deployment) -> ModelConfig:
        """The model as the deployment's ffn hardware runs it."""
        kind = device_kind(deployment.ffn.hardware or deployment.attention.hardware)
        told = {"modules": deployment.modules, "platform": platform_of(kind)}
        return msgspec.structs.replace(self.config, **told)


def plan_file(
    options: argparse.Namespace, hardware: Mapping[str, Hardware], calculator: Calculator
) -> PlanFile:
    """Returns the file of `--write`; raises ConfigError if the engine cannot run the model."""
    folder = model_folder(options.model, options.configs)
    config = model_config(folder, served=True)
    return PlanFile(options.write, folder.resolve(), config, hardware, calculator)


def deployment_text(file: PlanFile, plan: Plan, tpot: float) -> str:
    """The deployment of a plan for a TPOT in seconds, as YAML, with its predictions as comments."""
    layout, context = plan.layout, file.calculator.context
    names = [file.hardware[role].name for role in (layout.attention, layout.ffn)]
    told = {"plan": plan, "layout": layout, "names": names, "context": context}
    keys = _keys(file, plan) | {"scheduler.token_ms": token_ms(tpot, plan)}
    return _yaml(keys, _comments("plan_file", file, **told))


def _yaml(keys: Tree, comments: Sequence[str]) -> str:
    """Writes dotted keys in the order of their declarations, without those that are None."""
    order = known_keys()

    def place(key: str) -> int:
        return next(n for n, known in enumerate(order) if f"{key}.".startswith(f"{known}."))

    head = "".join(f"# {line}\n" for line in comments)
    tree = sections({key: keys[key] for key in sorted(keys, key=place)})
    return head + yaml.safe_dump(tree, sort_keys=False, width=100, default_flow_style=None)


def _keys(file: PlanFile, plan: Plan) -> Tree:
    layout = plan.layout
    on = file.hardware[layout.attention], file.hardware[layout.ffn]
    keys = layout_keys(file.calculator, layout, on, plan.batch)
    near = os.path.relpath(file.model, file.path.resolve().parent)
    keys["model"] = str(file.model) if near.startswith("../..") else near
    for role in layout.topology.roles:
        name = getattr(layout, role)
        keys[f"{role}.hardware"] = name if hardware_file(name) else None
    if layout.topology.crosses_runtimes:
        ports = range(keys["ffn.processes"] or 1)
        keys["link.addresses"] = [f"ffn-{number}:{PORT}" for number in ports]
    return keys


def _comments(report: str, file: PlanFile, **told: object) -> list[str]:
    (part,) = declared(report, assumed=file.calculator.assumed, **told)
    return list(part.lines)


def write_fleet(file: PlanFile, asked: Asked, made: FleetPlan, requests: Requests) -> int:
    """Writes the file of a fleet with as many slots as `serve` takes, within `PRECISION`, and
    returns their number. Prints a note if they are fewer than the fleet's: the file holds the
    longest sequence, too. Raises ConfigError if `serve` would refuse any number."""
    fleet, most = made.fleet, made.fleet.slots
    on = dict.fromkeys(one.name for one in fleet.unit.hardware)
    told = {"asked": asked, "fleet": fleet, "found": made.prediction, "roles": made.roles, "on": on}
    comments = _comments("fleet_file", file, layout=fleet.unit.layout, **told)

    def write(slots: int) -> None:
        file.write(_yaml(_fleet_keys(file, asked, made, requests, slots), comments))

    def taken(slots: int) -> bool:
        with contextlib.suppress(ConfigError):
            write(slots)
            return True
        return False

    if taken(most):
        return most
    numbers = [*range(most, 1, -max(1, int(PRECISION * most))), 1]
    found = numbers[min(bisect_left(numbers, True, key=taken), len(numbers) - 1)]
    write(found)
    print(
        f"{file.path}: {found} sequences a DP group and lane, not {most}: more do not fit",
        file=sys.stderr,
    )
    return found


def _fleet_keys(
    file: PlanFile, asked: Asked, made: FleetPlan, requests: Requests, slots: int
) -> Tree:
    fleet = made.fleet._replace(unit=made.fleet.unit._replace(slots=slots))
    unit, worker, domains = fleet.unit.layout, fleet.worker, fleet.units
    keys = _keys(file, msgspec.structs.replace(fleet.unit.plan, batch=slots))
    of_fleet = fleet.keys(asked, requests)
    if unit.topology.crosses_runtimes:  # the plan's keys say how its hosts divide the groups
        if domains > 1:
            raise ConfigError(
                f"--write: a file has one FFN worker for attention on other hardware, and "
                f"{domains} units have {domains}; plan for one unit's share of the rate"
            )
        del of_fleet["attention.dp"], of_fleet["domains"]
        domains = keys["domains"] or 1
    keys |= of_fleet
    keys["attention.hardware"] = unit.attention
    if unit.topology.has("ffn"):
        keys["ffn.hardware"] = unit.ffn
    if fleet.workers or fleet.units > 1:
        keys |= {
            "fleet.domains": [f"decode-{number}:{PORT}" for number in range(domains)],
            "fleet.ttft_seconds": asked.ttft.seconds,
            "fleet.tpot_seconds": asked.tpot.seconds,
        }
    if not fleet.workers:
        return keys
    replicas = worker.layout.redundant_slots or unit.redundant_slots
    if unit.topology.has("ffn"):  # colocated workers do not take over the link between the roles
        keys |= {f"prefill.link.{name}": keys[f"link.{name}"] for name in ("dispatch", "combine")}
    memory = usable(worker.hardware, file.calculator.assumed.reserve)
    return keys | {
        "fleet.prefill": [f"prefill-{number}:{PORT}" for number in range(fleet.workers)],
        "prefill.attention.memory_gb": round(memory / 1e9, 1),
        "prefill.attention.hardware": worker.layout.attention,
        "prefill.ffn.redundant_slots": worker.layout.redundant_slots if replicas else None,
        "prefill.ffn.shared": "split" if unit.shared_ranks else None,
    }
