"""Plans as deployment files that `serve --config` takes. Called by `plan search --write` and, with
prefill workers, the pages link, addresses and targets, by `plan deploy --write`.

Knows the keys of `config/deployment.py`, not how a plan came about. What `serve --check` would
refuse is written with fewer slots, or not at all.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml

from jaxserve.config.auto import page_tokens
from jaxserve.config.deployment import Deployment as Config
from jaxserve.config.load import deployment_of, load_deployment
from jaxserve.config.model import ModelConfig, platform_of
from jaxserve.config.shipped import device_kind, hardware_file
from jaxserve.errors import ConfigError
from jaxserve.planner.deploy import Asked, Deployment
from jaxserve.planner.deploy_demand import Requests
from jaxserve.planner.hardware import Hardware
from jaxserve.planner.memory import token_budget, usable
from jaxserve.planner.models import CostModel, model_config, model_folder
from jaxserve.planner.search import Plan, Searcher
from jaxserve.planner.stages import Calculator

REBALANCE_SECONDS = 600
"""Interval of plans with slots for replicas, whose predicted balance needs a placement by counts:
ten times the default window of counting, as `expert_balancer.SLICES` are looked back on."""
PORT = 9100
PULL = {"transport": "pull", "addresses": [f"ffn-0:{PORT}"]}
"""The link between two kinds of hardware, and where the ffn worker listens."""
PRECISION = 0.02
"""Share of a fleet's slots within which the most that `serve` takes is found."""
USED = 0.95
"""Share of a prefill worker's free memory that becomes pages."""

Tree = dict[str, Any]


class PlanFile(NamedTuple):
    """The file of a plan, and what the plan is for.

    Attributes:
      model: its folder.
      hardware: all that the plan may use, by name.
    """

    path: Path
    model: Path
    config: ModelConfig
    hardware: Mapping[str, Hardware]

    def write(self, text: str) -> None:
        """Writes a deployment, unless `serve` would refuse it: a search sums up weights by formula,
        `serve` by the model's own templates (`roles/capacity.py`).

        Raises:
          ConfigError: the deployment does not fit on its devices; gives the numbers.
        """
        from jaxserve.roles.capacity import check_capacity, memory_of  # imports JAX
        from jaxserve.roles.role_bytes import role_bytes

        self.path.write_text(text, encoding="utf-8")
        try:
            deployment = load_deployment(self.path)
            loaded = self._loaded(deployment)
            check_capacity(loaded, deployment, memory_of(deployment), role_bytes)
            if deployment.prefill.workers:
                worker = deployment_of(deployment, "prefill")
                check_capacity(loaded, worker, memory_of(worker), role_bytes)
        except ConfigError:
            self.path.unlink()
            raise

    def pages_beside(self) -> int:
        """Pages of a DP group of the file's prefill workers, with most of the memory that their
        least number leaves, as `serve` counts."""
        from jaxserve.roles.role_bytes import role_bytes  # imports JAX

        whole = load_deployment(self.path)
        worker = deployment_of(whole, "prefill")
        held = role_bytes(self._loaded(whole), worker)[0]
        free = worker.attention.memory_gb * 1e9 - held.total
        return worker.cache.pages + max(0, int(USED * free * worker.cache.pages / held.cache))

    def _loaded(self, deployment: Config) -> ModelConfig:
        """The model as the deployment's ffn hardware runs it."""
        kind = device_kind(deployment.ffn.hardware or deployment.attention.hardware)
        told = {"modules": deployment.modules, "platform": platform_of(kind)}
        return msgspec.structs.replace(self.config, **told)


def plan_file(options: argparse.Namespace, hardware: Mapping[str, Hardware]) -> PlanFile:
    """Returns the file that `--write` names.

    Raises:
      ConfigError: the engine cannot run the model.
    """
    folder = model_folder(options.model, options.configs)
    config = model_config(folder)
    if config is None:
        raise ConfigError(f"--write: the engine cannot run {options.model}, only plan it")
    return PlanFile(options.write, folder.resolve(), config, hardware)


def write_plan(file: PlanFile, plan: Plan, searcher: Searcher) -> None:
    """Writes a plan, or its layout with the largest batch that `serve` would take: the search knows
    neither the templates' padding nor the pages that the longest sequence takes.

    Raises:
      ConfigError: `serve` would refuse even one sequence a DP group and lane.
    """

    def write(batch: int) -> None:
        made = plan if batch == plan.batch else searcher.evaluate(plan.layout, batch)
        file.write(deployment_text(file, made, searcher.calculator))

    largest_written(file, write, plan.batch)


def deployment_text(file: PlanFile, plan: Plan, calculator: Calculator) -> str:
    """The deployment of a plan as YAML, with what is predicted as comments."""
    return _yaml(_tree(file, plan, calculator), _comments(file, plan, calculator))


def _yaml(tree: Tree, comments: Sequence[str]) -> str:
    head = "".join(f"# {line}\n" for line in comments)
    return head + yaml.safe_dump(tree, sort_keys=False, width=100, default_flow_style=None)


def _tree(file: PlanFile, plan: Plan, calculator: Calculator) -> Tree:
    """The keys of a plan's deployment."""
    layout, formats, assumed = plan.layout, calculator.formats, calculator.assumed
    a, f = file.hardware[layout.attention], file.hardware[layout.ffn]
    page = page_tokens(a.platform, formats.cache)
    colocated = layout.topology.has("colocated")
    kept = file.config.stored == "fp8_block" and formats.weights == "fp8"
    weights = "auto" if kept else formats.weights
    longest = min(file.config.max_positions, 2 * calculator.context)
    budget = token_budget(plan.batch, layout.drafts)
    group = max(calculator.model.ffn, key=lambda each: each.experts)
    exchange = calculator.exchange_kind(group, layout.ffn_mesh, f)
    ffn: Tree = {"weights": weights}
    if not colocated:
        memory = round(usable(f, assumed.reserve) / 1e9, 1)
        ffn = {"ep": layout.ep, "tp": layout.ffn_tp, **ffn, "memory_gb": memory}
        ffn |= _hardware(layout.ffn)
    for name in ("redundant_slots", "shared_ranks"):
        if number := getattr(layout, name):
            ffn[name] = number
    domains, apart = 1, layout.topology.crosses_runtimes
    if apart:  # a worker over `pull` is one process of one host
        domains = max(1, layout.attention_devices // a.devices_per_host)
        ffn["runtime"] = "ffn"
    if assumed.alltoall and exchange == "alltoall":
        ffn["exchange"] = exchange
    combine = {} if formats.combine == "auto" else {"combine": formats.combine}
    sequences = layout.lanes * plan.batch
    tree = {
        "model": _path(file.model, file.path.resolve().parent),
        "mode": "colocated" if colocated else "afd",
        "dtype": "float32" if a.platform == "cpu" else "bfloat16",
        "lanes": layout.lanes,
        **({"domains": domains} if domains > 1 else {}),
        "attention": {
            "dp": layout.dp // domains,
            "tp": layout.tp,
            "weights": weights,
            "memory_gb": round(usable(a, assumed.reserve) / 1e9, 1),
            **_hardware(layout.attention),
            **({"runtime": "attention"} if apart else {}),
        },
        "ffn": ffn,
        "link": {"dispatch": formats.dispatch, **combine, **(PULL if apart else {})},
        "cache": {
            "format": formats.cache,
            "page_size": page,
            "pages": max(-(-longest // page), sequences * -(-calculator.context // page)),
        },
        "scheduler": {
            "slots": plan.batch,
            "max_length": longest,
            "token_budget": budget,
            "token_buckets": sorted({plan.batch, plan.batch * (1 + layout.drafts), budget}),
        },
    }
    if layout.redundant_slots:
        tree["experts"] = {"rebalance_seconds": REBALANCE_SECONDS}
    if layout.drafts:
        tree["speculative"] = {"method": "mtp", "drafts": layout.drafts}
    return tree


def _hardware(name: str) -> Tree:
    """Names a role's hardware, where it comes with the package."""
    return {"hardware": name} if hardware_file(name) else {}


def _path(model: Path, folder: Path) -> str:
    """The model's path relative to the file, if they are near each other."""
    relative = os.path.relpath(model, folder)
    return str(model) if relative.startswith("../..") else relative


def _comments(file: PlanFile, plan: Plan, calculator: Calculator) -> list[str]:
    layout = plan.layout
    a, f = file.hardware[layout.attention].name, file.hardware[layout.ffn].name
    devices = f"{layout.attention_devices} {a} for attention, {layout.ffn_devices} {f} for the FFN"
    if layout.topology.has("colocated"):
        devices = f"{layout.devices} {a}, colocated"
    return [
        f"{devices}: {plan.sequences} sequences of {calculator.context:,} tokens",
        f"Predicted, not measured: {plan.tpot * 1e3:.1f} ms a token, "
        f"{plan.tokens_per_second:.0f} tokens/s, {plan.tokens_per_device:.0f} a device, "
        f"{plan.dollars:.3f} USD a million of output. Decoding alone: prompts are not in it.",
        *_beyond(calculator),
    ]


def _beyond(calculator: Calculator) -> list[str]:
    beyond = ", ".join(calculator.assumed.beyond_engine)
    return [f"Assumed, and not what this engine does: {beyond}."] if beyond else []


def largest_written(
    file: PlanFile, write: Callable[[int], None], most: int, part: float = 0.0
) -> int:
    """Writes with the largest accepted number from 1 to `most`, found by bisection, perhaps less by
    the share `part`. Returns the number, and prints a note if it is below `most`.

    Args:
      write: writes with a number; raises ConfigError if `serve` would refuse the result.

    Raises:
      ConfigError: even 1 is refused.
    """
    try:
        write(most)
        return most
    except ConfigError:
        if most == 1:
            raise
    low, high, last = 1, most, 1  # what is taken, what is refused, and what was tried last
    write(low)
    while high - low > max(1, part * low):
        last = (low + high) // 2
        try:
            write(last)
            low = last
        except ConfigError:
            high = last
    if last != low:
        write(low)
    print(
        f"{file.path}: {low} sequences a DP group and lane, not {most}: with activations, as serve "
        "counts them, more do not fit",
        file=sys.stderr,
    )
    return low


class FleetFile(NamedTuple):
    """The file of a fleet's plan."""

    file: PlanFile
    cost: CostModel
    calculator: Calculator
    asked: Asked

    def write(self, made: Deployment, requests: Requests) -> int:
        """Writes the fleet; returns its slots.

        Raises:
          ConfigError: `serve` would refuse it whatever the slots.
        """

        def write(slots: int) -> None:
            tree, comments = self._tree(made, requests, slots), self._comments(made)
            self.file.write(_yaml(tree, comments))
            tree["prefill"]["cache"]["pages"] = self.file.pages_beside()
            self.file.write(_yaml(tree, comments))

        return largest_written(self.file, write, made.fleet.slots, PRECISION)

    def _tree(self, made: Deployment, requests: Requests, slots: int) -> Tree:
        fleet, asked = made.fleet, self.asked
        unit, worker = fleet.unit.layout, fleet.worker
        plan = msgspec.structs.replace(made.plan, batch=slots)
        tree = _tree(self.file, plan, self.calculator)
        fewer = fleet._replace(unit=fleet.unit._replace(slots=slots))
        for name, value in fewer.keys(asked.longest, asked.page, requests, self.cost).items():
            tree[name] = {**tree.get(name, {}), **value} if isinstance(value, dict) else value
        tree["attention"]["hardware"] = unit.attention
        if unit.topology.has("ffn"):
            tree["ffn"]["hardware"] = unit.ffn
        usable = 1 - self.calculator.assumed.reserve / 2
        tree["prefill"]["attention"] |= {
            "memory_gb": round(worker.hardware.memory_gb * usable, 1),
            "hardware": worker.layout.attention,
        }
        if worker.layout.redundant_slots or unit.redundant_slots:
            tree["prefill"]["ffn"] = {"redundant_slots": worker.layout.redundant_slots}
        if unit.shared_ranks:
            tree["prefill"]["ffn"] = {**tree["prefill"].get("ffn", {}), "shared_ranks": 0}
        # Their number follows from the memory that one prompt leaves (`pages_beside`).
        tree["prefill"]["cache"]["pages"] = -(-asked.longest // asked.page) + 1
        tree["fleet"] |= {
            "prefill": [f"prefill-{number}:{PORT}" for number in range(fleet.workers)],
            "domains": [f"decode-{number}:{PORT}" for number in range(fleet.units)],
            "ttft_seconds": asked.ttft.seconds,
            "tpot_seconds": asked.tpot.seconds,
        }
        return tree

    def _comments(self, made: Deployment) -> list[str]:
        fleet, asked, found = made.fleet, self.asked, made.prediction
        worker, layout = fleet.worker, fleet.unit.layout
        spare = [
            f"{role.spare_hosts} servers of {role.hardware.name} for {role.name}"
            for role in made.roles
            if role.spare_hosts
        ]
        names = dict.fromkeys(one.name for one in fleet.unit.hardware)
        return [
            f"For {asked.text}.",
            f"{fleet.workers} prefill workers of {worker.layout.devices} {worker.hardware.name}, "
            f"{fleet.units} decode units of {layout.devices} {' and '.join(names)} "
            f"({layout.mode}). Standing by: {', '.join(spare) or 'nothing'}.",
            f"Simulated, not measured: TTFT p{asked.ttft.percent:g} {found.ttft_asked:.2f} s, TPOT "
            f"p{asked.tpot.percent:g} {found.tpot_asked * 1e3:.1f} ms.",
            *_beyond(self.calculator),
            "Start: a router, every worker of `prefill` and every domain, each at its address.",
        ]
