"""Configuration keys of a layout: those of the file that a plan is written as, and those by which
its memory is counted. Knows the keys of `config/deployment.py`, not how a plan came about.
"""

from typing import TYPE_CHECKING, Any

import msgspec

from jaxserve.config.auto import page_tokens
from jaxserve.config.deployment import Deployment
from jaxserve.config.load import set_key
from jaxserve.planner.hardware import Hardware
from jaxserve.planner.layouts import Layout
from jaxserve.planner.stages import Calculator

if TYPE_CHECKING:
    from jaxserve.planner.search import Plan

Tree = dict[str, Any]
"""Keys and values, dotted or in sections; None: not set."""

MOST_TOKENS = 65536
"""Most tokens of a DP group's step."""
REBALANCE_SECONDS = 600
"""Interval of plans with slots for replicas, whose predicted balance needs a placement by counts:
ten times the default window of counting, as `expert_balancer.SLICES` are looked back on."""


def usable(hardware: Hardware, reserve: float) -> float:
    """Bytes that a deployment may fill: written as `memory_gb`, in tenths of a GB."""
    return round(hardware.memory_gb * (1 - reserve / 2), 1) * 1e9


def mesh_keys(layout: Layout, domains: int = 1) -> Tree:
    """Dotted keys of a decode unit's meshes; `domains` runtimes divide the DP groups."""
    colocated = layout.topology.has("colocated")
    return {
        "mode": "colocated" if colocated else "afd",
        "lanes": layout.lanes,
        "pipeline": "step" if colocated and layout.lanes > 1 else None,
        "domains": domains if domains > 1 else None,
        "attention.dp": layout.dp // domains,
        "attention.tp": layout.tp,
        "ffn.ep": None if colocated else layout.ep,
        "ffn.tp": None if colocated else layout.ffn_tp,
    }


def token_ms(tpot: float, plan: "Plan") -> float:
    """`scheduler.token_ms` for a time per output token in seconds: that of a step of the plan."""
    return round(1e3 * tpot * plan.tokens_a_step, 3)


def sequence_keys(layout: Layout, slots: int, longest: int, page: int, pages: int) -> Tree:
    """Dotted keys of a decode unit's cache and scheduler: of `slots` sequences a DP group and lane,
    `longest` tokens at most, and of the tokens of a page and the pages of a DP group."""
    budget = min(slots * (1 + layout.drafts) + max(slots, 128), MOST_TOKENS)  # some of prompts, too
    return {
        "cache.page_size": page,
        "cache.pages": pages,
        "scheduler.slots": slots,
        "scheduler.max_length": longest,
        "scheduler.token_budget": budget,
        "scheduler.token_buckets": sorted({slots, slots * (1 + layout.drafts), budget}),
    }


def sized_keys(calculator: Calculator, layout: Layout, on: Hardware, batch: int) -> Tree:
    """The part of `layout_keys` that depends on the batch, on this hardware of attention."""
    config = calculator.model.config
    page = page_tokens(on.platform, calculator.formats.cache, config.page_unit)
    longest = min(config.max_positions, 2 * calculator.context)
    pages = max(-(-longest // page), layout.lanes * batch * -(-calculator.context // page))
    return sequence_keys(layout, batch, longest, page, pages)


def layout_keys(
    calculator: Calculator, layout: Layout, on: tuple[Hardware, Hardware], batch: int
) -> Tree:
    """Dotted keys of a layout with the calculator's formats, on hardware of attention and of the
    FFN. It decodes `batch` sequences of the calculator's context a DP group and lane."""
    formats, assumed, (a, f) = calculator.formats, calculator.assumed, on
    config = calculator.model.config
    colocated, apart = layout.topology.has("colocated"), layout.topology.crosses_runtimes
    # Over `pull` a domain is one process of one host; the ffn worker has one on each host.
    domains = max(1, layout.attention_devices // a.devices_per_host) if apart else 1
    processes = -(-layout.ffn_devices // f.devices_per_host) if apart else 1
    kept = config.stored == "fp8_block" and formats.weights == "fp8"
    weights = "auto" if kept else formats.weights
    group = max(calculator.model.ffn, key=lambda each: each.experts)
    exchange = calculator.exchange_kind(group, layout.ffn_mesh, f)

    def of_role(role: str, hardware: Hardware) -> Tree:
        return {
            f"{role}.weights": weights,
            f"{role}.memory_gb": round(usable(hardware, assumed.reserve) / 1e9, 1),
            f"{role}.runtime": role if apart else None,
        }

    return {
        "dtype": "float32" if a.platform == "cpu" else "bfloat16",
        **mesh_keys(layout, domains),
        **sized_keys(calculator, layout, a, batch),
        **of_role("attention", a),
        **({"ffn.weights": weights} if colocated else of_role("ffn", f)),
        "ffn.processes": processes if processes > 1 else None,
        "ffn.redundant_slots": layout.redundant_slots or None,
        "ffn.shared": f"ranks:{layout.shared_ranks}" if layout.shared_ranks else None,
        "ffn.exchange": exchange if assumed.alltoall and exchange == "alltoall" else None,
        "link.dispatch": formats.dispatch,
        "link.combine": None if formats.combine == "auto" else formats.combine,
        "link.transport": "pull" if apart else None,
        "cache.format": formats.cache,
        "experts.rebalance_seconds": REBALANCE_SECONDS if layout.redundant_slots else None,
        "speculative.method": "mtp" if layout.drafts else None,
        "speculative.drafts": layout.drafts or None,
    }


def sections(keys: Tree) -> Tree:
    """Dotted keys as sections, without those that are not set."""
    tree = Tree()
    for key, value in keys.items():
        if value is not None:
            set_key(tree, key, value)
    return tree


def deployment_of_layout(keys: Tree) -> Deployment:
    """Returns the deployment with these keys, which no file has been written for."""
    return msgspec.convert({"model": "", **sections(keys)}, Deployment)
