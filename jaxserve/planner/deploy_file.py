"""A plan of a whole deployment as one file: of routers, prefill workers and decode units. Called by
`fleet/deploy_command.py`.

The part of a decode unit is what `search --write` writes (`deployment_file.py`); here are added the
prefill workers, the pages link, the addresses and the targets. What `serve --check` would refuse is
written with fewer slots, or not at all.
"""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml

from jaxserve.config.model import ModelConfig
from jaxserve.planner.deploy import Asked, Deployment
from jaxserve.planner.deploy_demand import Requests
from jaxserve.planner.deploy_fleet import occupied
from jaxserve.planner.deployment_file import (
    deployment_text,
    largest_written,
    pages_beside,
    write_deployment,
)
from jaxserve.planner.hardware import Hardware
from jaxserve.planner.models import CostModel
from jaxserve.planner.search import Searcher

HELD_SLOTS = 16
"""Prompts of a DP group of a prefill worker at a time."""
PORT = 9100
PRECISION = 0.02
"""Of the slots, where `serve` refuses the most."""
USED = 0.95
"""Part of a prefill worker's free memory that becomes pages."""


class Named(NamedTuple):
    """What the file is about.

    Attributes:
      model: the folder.
      names: of the hardware, as on the command line, by what it calls itself.
    """

    model: Path
    config: ModelConfig
    cost: CostModel
    hardware: dict[str, Hardware]
    names: dict[str, str]


class Writer:
    """Writes a plan."""

    def __init__(self, file: Path, named: Named, searcher: Searcher, asked: Asked):
        self._file, self._named = file, named
        self._searcher, self._asked = searcher, asked

    def slots(self, made: Deployment) -> int:
        """Sequences of a DP group and lane that there are in all but one moment of a thousand."""
        fleet = made.fleet
        layout = fleet.unit.layout
        peak = occupied(made.prediction.sequences, 99.9)
        lanes = fleet.units * layout.dp * layout.lanes
        # Whole requests go to DP groups: the fullest of them has one more than its share.
        return max(1, min(fleet.unit.slots, int(peak / lanes) + 2))

    def write(self, made: Deployment, requests: Requests) -> int:
        """Writes the file; returns its slots.

        Raises:
          ConfigError: `serve` would refuse it whatever the slots.
        """
        return largest_written(
            lambda slots: self._write(made, requests, slots), self.slots(made), PRECISION
        )

    def _write(self, made: Deployment, requests: Requests, slots: int) -> None:
        tree, head = self._tree(made, requests, slots)
        text = head + yaml.safe_dump(tree, sort_keys=False, width=100, default_flow_style=None)
        write_deployment(self._file, text, self._named.config)
        tree["prefill"]["cache"]["pages"] = pages_beside(self._file, self._named.config, USED)
        text = head + yaml.safe_dump(tree, sort_keys=False, width=100, default_flow_style=None)
        write_deployment(self._file, text, self._named.config)

    def _tree(self, made: Deployment, requests: Requests, slots: int) -> tuple[dict[str, Any], str]:
        fleet, asked, named = made.fleet, self._asked, self._named
        calculator, layout = self._searcher.calculator, fleet.unit.layout
        plan = msgspec.structs.replace(made.plan, batch=slots)
        text = deployment_text(
            plan,
            named.model,
            named.config,
            calculator.context,
            calculator.formats,
            calculator.assumed,
            named.hardware,
            self._file.resolve().parent,
        )
        tree = yaml.safe_load(text)
        limits, page = tree["scheduler"], tree["cache"]["page_size"]
        limits["max_length"] = longest = asked.longest
        longest_pages = -(-longest // page)
        limits["page_buckets"] = sorted({-(-longest_pages // 4), longest_pages})
        running = layout.lanes * slots
        tokens = running * (requests.context + page)
        tokens += 2 * requests.context_spread * running**0.5
        tree["cache"]["pages"] = max(longest_pages + 1, -int(-tokens // page))
        tree["attention"]["hardware"] = named.names[fleet.unit.hardware[0].name]
        if layout.topology.has("ffn"):
            tree["ffn"]["hardware"] = named.names[fleet.unit.hardware[1].name]
        else:
            tree["domains"] = fleet.units
        tree["prefill"] = self._prefill(made, tree)
        tree["pages"] = {"on_failure": "recompute", "recompute_tokens": 8192, "held": 256}
        tree["fleet"] = {
            "prefill": [f"prefill-{number}:{PORT}" for number in range(fleet.workers)],
            "domains": [f"decode-{number}:{PORT}" for number in range(fleet.units)],
            "prefill_waiting": max(64, 8 * fleet.worker.layout.dp),
            "ttft_seconds": asked.ttft.seconds,
            "tpot_seconds": asked.tpot.seconds,
        }
        return tree, "\n".join(f"# {line}" for line in self._head(made)) + "\n"

    def _prefill(self, made: Deployment, tree: dict[str, Any]) -> dict[str, Any]:
        worker, named = made.fleet.worker, self._named
        layout, hardware = worker.layout, worker.hardware
        usable = 1 - self._searcher.calculator.assumed.reserve / 2
        heads = [group.layers * group.q_heads * group.head_dim for group in named.cost.attention]
        ffn = {"redundant_slots": layout.redundant_slots} if layout.redundant_slots else {}
        if not ffn and made.fleet.unit.layout.redundant_slots:
            ffn = {"redundant_slots": 0}
        if made.fleet.unit.layout.shared_ranks:
            ffn["shared_ranks"] = 0
        return {
            "workers": made.fleet.workers,
            "mode": "colocated",
            "lanes": 1,
            "quadratic_tokens": max(1, round(named.cost.activated / sum(heads))),
            "attention": {
                "dp": layout.dp,
                "tp": layout.tp,
                "memory_gb": round(hardware.memory_gb * usable, 1),
                "hardware": named.names[hardware.name],
            },
            **({"ffn": ffn} if ffn else {}),
            "cache": {"pages": -(-self._asked.longest // tree["cache"]["page_size"]) + 1},
            "scheduler": {
                "slots": HELD_SLOTS,
                "token_budget": worker.chunk,
                "token_buckets": [worker.chunk // 4, worker.chunk],
            },
        }

    def _head(self, made: Deployment) -> list[str]:
        fleet, asked, unit = made.fleet, self._asked, made.fleet.unit
        demand, worker = asked.demand, made.fleet.worker
        found = made.prediction
        beyond = self._searcher.calculator.assumed.beyond_engine
        spare = ", ".join(
            f"{role.spare_hosts} servers of {role.hardware.name} for {role.name}"
            for role in made.roles
            if role.spare_hosts
        )
        return [
            f"For {demand.rate:g} requests a second of {demand.prompt:,} tokens and "
            f"{demand.output:,} of output, {demand.hits:.1%} of the prompts in a prefix cache, "
            f"TTFT {asked.ttft.text}, TPOT {asked.tpot.text}.",
            f"{fleet.workers} prefill workers of {worker.layout.devices} {worker.hardware.name}, "
            f"{fleet.units} decode units of {unit.layout.devices} {unit.hardware[0].name}"
            + (
                f" and {unit.hardware[1].name}"
                if unit.hardware[0].name != unit.hardware[1].name
                and unit.layout.topology.has("ffn")
                else ""
            )
            + f" ({unit.layout.mode}). Standing by: {spare or 'nothing'}.",
            f"Predicted, not measured: TTFT {asked.ttft.text.split('=')[0]} "
            f"{found.ttft_asked:.2f} s, TPOT {asked.tpot.text.split('=')[0]} "
            f"{found.tpot_asked * 1e3:.1f} ms.",
            *([f"Assumed, and not what this engine does: {', '.join(beyond)}."] if beyond else []),
            "Start: a router, every worker of `prefill` and every domain, each at its address.",
        ]
