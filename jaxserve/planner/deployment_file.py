"""A plan as a deployment file that `jaxserve.serve --config` takes. Called by `plan.py search
--write`; it knows the keys of `config/deployment.py`, not how a plan came about."""

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from jaxserve.config.auto import page_tokens
from jaxserve.config.deployment import Deployment
from jaxserve.config.load import deployment_of, load_deployment
from jaxserve.config.model import ModelConfig, platform_of
from jaxserve.config.shipped import device_kind, hardware_file
from jaxserve.errors import ConfigError
from jaxserve.planner.assumptions import Assumptions, Formats
from jaxserve.planner.hardware import Hardware
from jaxserve.planner.memory import token_budget, usable
from jaxserve.planner.models import cost_model
from jaxserve.planner.search import Plan, Searcher
from jaxserve.planner.stages import Calculator

REBALANCE_SECONDS = 600
"""Of plans with slots for replicas, whose predicted balance needs experts that are placed by what
they get: ten times the default window of counting, as `expert_balancer.SLICES` are looked back
on."""


def deployment_text(
    plan: Plan,
    model: Path,
    config: ModelConfig,
    context: int,
    formats: Formats,
    assumed: Assumptions,
    hardware: dict[str, Hardware],
    folder: Path,
) -> str:
    """The deployment of a plan as YAML text.

    Args:
      model: the model folder; written relative to `folder`, where the file will be.
      hardware: the plan's hardware by name.
    """
    layout = plan.layout
    page = page_tokens(hardware[layout.attention].platform, formats.cache)
    colocated = layout.topology.has("colocated")
    calculator = Calculator(cost_model(config), context, formats, assumed)
    group = max(calculator.model.ffn, key=lambda each: each.experts)
    exchange = calculator.exchange_kind(group, layout.ffn_mesh, hardware[layout.ffn])
    a, f = hardware[layout.attention], hardware[layout.ffn]
    kept = config.stored == "fp8_block" and formats.weights == "fp8"
    weights = "auto" if kept else formats.weights
    longest = min(config.max_positions, 2 * context)
    pages_longest = -(-longest // page)
    pages = max(pages_longest, layout.lanes * plan.batch * -(-context // page))
    decoded = plan.batch * (1 + layout.drafts)
    budget = token_budget(plan.batch, layout.drafts)
    beyond = ", ".join(assumed.beyond_engine)
    lines = [
        f"# {_sentence(plan, a, f, context)}",
        f"# Predicted, not measured: {plan.tpot * 1e3:.1f} ms a token, "
        f"{plan.tokens_per_second:.0f} tokens/s, {plan.tokens_per_device:.0f} a device, "
        f"{plan.dollars:.3f} USD a million of output. Decoding alone: prompts are not in it.",
        *([f"# Assumed, and not what this engine does: {beyond}."] if beyond else []),
        f"model: {_path(model, folder)}",
        f"mode: {'colocated' if colocated else 'afd'}",
        f"dtype: {'float32' if a.platform == 'cpu' else 'bfloat16'}",
        f"lanes: {layout.lanes}",
        "attention:",
        f"  dp: {layout.dp}",
        f"  tp: {layout.tp}",
        f"  weights: {weights}",
        f"  memory_gb: {usable(a, assumed.reserve) / 1e9:.1f}",
        *_hardware(layout.attention),
        "ffn:",
        *([] if colocated else [f"  ep: {layout.ep}", f"  tp: {layout.ffn_tp}"]),
        f"  weights: {weights}",
        *([f"  redundant_slots: {layout.redundant_slots}"] if layout.redundant_slots else []),
        *([f"  shared_ranks: {layout.shared_ranks}"] if layout.shared_ranks else []),
        *(["  exchange: alltoall"] if assumed.alltoall and exchange == "alltoall" else []),
        *([] if colocated else [f"  memory_gb: {usable(f, assumed.reserve) / 1e9:.1f}"]),
        *([] if colocated else _hardware(layout.ffn)),
        f"link: {{dispatch: {formats.dispatch}"
        + (f", combine: {formats.combine}}}" if formats.combine != "auto" else "}"),
        "cache:",
        f"  format: {formats.cache}",
        f"  page_size: {page}",
        f"  pages: {pages}",
        "scheduler:",
        f"  slots: {plan.batch}",
        f"  max_length: {longest}",
        f"  token_budget: {budget}",
        f"  token_buckets: [{', '.join(map(str, sorted({plan.batch, decoded, budget})))}]",
    ]
    if layout.redundant_slots:
        lines.append(f"experts: {{rebalance_seconds: {REBALANCE_SECONDS}}}")
    if layout.drafts:
        lines.append(f"speculative: {{method: mtp, drafts: {layout.drafts}}}")
    return "\n".join(lines) + "\n"


def write_deployment(file: Path, text: str, config: ModelConfig) -> None:
    """Writes the file, unless `serve` would refuse it: a search sums up weights by formula, `serve`
    by the model's own templates (`roles/capacity.py`).

    Raises:
      ConfigError: the deployment does not fit on its devices; gives the numbers.
    """
    from jaxserve.roles.capacity import check_capacity, memory_of  # imports JAX

    file.write_text(text, encoding="utf-8")
    try:
        deployment = load_deployment(file)
        loaded = _deployed(config, deployment)
        check_capacity(loaded, deployment, memory_of(deployment))
        if deployment.prefill.workers:
            worker = deployment_of(deployment, "prefill")
            check_capacity(loaded, worker, memory_of(worker))
    except ConfigError:
        file.unlink()
        raise


def _deployed(config: ModelConfig, deployment: Deployment) -> ModelConfig:
    """Returns the model as the deployment's ffn hardware runs it."""
    kind = device_kind(deployment.ffn.hardware or deployment.attention.hardware)
    platform = platform_of(kind)
    return msgspec.structs.replace(config, modules=deployment.modules, platform=platform)


def pages_beside(file: Path, config: ModelConfig, used: float) -> int:
    """Pages of a DP group of the file's prefill workers, with a part of the memory that their least
    number leaves, as `serve` counts."""
    from jaxserve.roles.capacity import role_bytes  # imports JAX

    whole = load_deployment(file)
    worker = deployment_of(whole, "prefill")
    loaded = _deployed(config, whole)
    held = role_bytes(loaded, worker)[0]
    free = worker.attention.memory_gb * 1e9 - held.total
    return worker.cache.pages + max(0, int(used * free * worker.cache.pages / held.cache))


def write_largest(
    file: Path,
    plan: Plan,
    searcher: Searcher,
    text_of: Callable[[Plan], str],
    config: ModelConfig,
) -> Plan:
    """Writes the plan, or its layout with the largest batch that `serve` would take: the search
    knows neither the templates' padding nor the pages that the longest sequence takes.

    Args:
      text_of: the file of a plan.

    Returns:
      the plan that was written.

    Raises:
      ConfigError: `serve` would refuse even one sequence a DP group and lane.
    """
    plans = {plan.batch: plan}

    def write(batch: int) -> None:
        if batch not in plans:
            plans[batch] = searcher.evaluate(plan.layout, batch)
        write_deployment(file, text_of(plans[batch]), config)

    return plans[largest_written(write, plan.batch)]


def largest_written(write: Callable[[int], None], most: int, part: float = 0.0) -> int:
    """Writes with the largest number from 1 to `most` that is taken, or one less than this part
    below it; returns it.

    Args:
      write: raises ConfigError where `serve` would refuse what it writes.

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
    return low


def _hardware(name: str) -> list[str]:
    """Returns the line that names a role's hardware, where it comes with the package."""
    return [f"  hardware: {name}"] if hardware_file(name) else []


def _path(model: Path, folder: Path) -> str:
    """The model's path relative to the file, if they are near each other."""
    relative = os.path.relpath(model, folder)
    return str(model) if relative.startswith("../..") else relative


def _sentence(plan: Plan, a: Hardware, f: Hardware, context: int) -> str:
    layout = plan.layout
    if layout.topology.has("colocated"):
        devices = f"{layout.devices} {a.name}, colocated"
        return f"{devices}: {plan.sequences} sequences of {context:,} tokens"
    return (
        f"{layout.attention_devices} {a.name} for attention, {layout.ffn_devices} {f.name} for the "
        f"FFN: {plan.sequences} sequences of {context:,} tokens"
    )
