"""The rules of Step-3 §5.3, §5.4 and §6, with the numbers of a model, its hardware and a plan.
Called by `plan.py search`."""

from typing import NamedTuple

from jaxserve.planner.cost import (
    attention_fit,
    ffn_batch,
    ffn_fit,
    minimum_sparsity,
    network_batch,
)
from jaxserve.planner.hardware import Hardware
from jaxserve.planner.models import CostModel
from jaxserve.planner.search import Plan


class Check(NamedTuple):
    """A rule and whether it holds."""

    name: str
    holds: bool
    numbers: str


def checks(
    model: CostModel,
    context: int,
    tpot: float,
    attention: Hardware,
    ffn: Hardware,
    plan: Plan | None = None,
) -> list[Check]:
    """Checks the rules for a pair of hardware and, given a plan, for its batch.

    Args:
      tpot: time per output token in seconds; each of the three pipeline stages gets a third.
    """
    stage = tpot / 3
    layer = stage / model.layers
    found = []
    moe = model.moe
    sparsity = moe.sparsity if moe else 1.0
    fills = ffn_batch(ffn, sparsity)
    if moe:
        least = minimum_sparsity(ffn, model.d_model, model.layers, stage)
        found.append(
            Check(
                "sparsity (§5.4)",
                sparsity >= least,
                f"experts' sparsity {sparsity:.3f}, least {least:.3f} for {ffn.name} at "
                f"{tpot * 1e3:g} ms: {fills:.0f} tokens fill the FFN, the network carries "
                f"{network_batch(ffn, model.d_model, model.layers, stage):.0f} a stage",
            )
        )
    if plan is not None:
        tokens = plan.layout.dp * plan.batch
        found.append(
            Check(
                "FFN batch (§5.3)",
                tokens >= fills,
                f"{tokens} tokens a lane, {fills:.0f} make the FFN compute-bound on {ffn.name}",
            )
        )
    fit = attention_fit(model, attention, layer)
    sequences = fit.cached_tokens // context
    found.append(
        Check(
            "attention in time (§6)",
            sequences >= 1,
            f"{attention.name} reads {fit.readable_bytes / 1e6:.0f} MB in {layer * 1e6:.0f} µs, of "
            f"which {fit.linear_bytes / 1e6:.0f} MB are weights: {fit.cached_tokens:,} tokens of "
            f"cache, {sequences} sequences of {context:,} a device and lane",
        )
    )
    needed = ffn_fit(model, ffn, layer)
    found.append(
        Check(
            "FFN in time (§6)",
            needed.devices < 100,
            f"{needed.weight_bytes / 1e9:.0f} GB of FFN weights at half of the bandwidth take "
            f"{needed.hosts} hosts, {needed.devices} {ffn.name} (a hundred and more are trouble)",
        )
    )
    return found
