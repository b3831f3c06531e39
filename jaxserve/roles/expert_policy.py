"""Which experts should move, and what that would bring: pure functions of counts.

Called by `expert_balancer.py`, and by whoever wants a prediction. A layer is left alone unless its
busiest rank would get noticeably less to do (hysteresis): a move costs bandwidth and gains nothing
where the skew is noise.
"""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from jaxserve.model.ffn.balance import rebalance, rebalance_slices
from jaxserve.model.ffn.placement import (
    Placement,
    Round,
    SlotSizes,
    aligned,
    balance_of,
    plan_rounds,
    rank_loads,
)
from jaxserve.roles.expert_moves import LayerProposal, Proposal

CLOSE = 0.02
"""Part of the mean by which the busiest rank of a placement with fewer moves may be busier."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How to propose; see the section `experts` of the deployment."""

    least_gain: float = 0.05
    bytes_per_second: float = 1e9
    slot_bytes: int = 0
    groups: int = 1
    nodes: int = 1


def propose(
    counts: Mapping[int, np.ndarray],
    placements: Mapping[int, Placement],
    sizes: SlotSizes,
    options: Options,
) -> Proposal:
    """The best placement of every layer for the tokens that were counted.

    Args:
      counts: layer → tokens [slices of time, experts].
      placements: layer → the expert of every slot now.
    """
    layers, mean, now, then = [], 0.0, 0.0, 0.0
    for layer, slices in sorted(counts.items()):
        current, total = placements[layer], slices.sum(axis=0).astype(np.float64)
        loads = rank_loads(current, total, sizes.ranks)
        mean, now = mean + float(np.mean(loads)), now + float(np.max(loads))
        target = _best(slices, current, sizes, options)
        loads_then = rank_loads(target, total, sizes.ranks)
        if np.max(loads_then) > (1 - options.least_gain) * np.max(loads) or not total.any():
            then += float(np.max(loads))
            continue
        then += float(np.max(loads_then))
        rounds = plan_rounds(current, target, sizes.ranks)
        layers.append(
            LayerProposal(
                layer,
                list(rounds[-1].placement) if rounds else list(current),
                loads.tolist(),
                loads_then.tolist(),
                _copies(rounds),
            )
        )
    moves = sum(layer.moves for layer in layers)
    size = moves * options.slot_bytes
    return Proposal(
        balance_now=mean / now if now else 1.0,
        balance_then=mean / then if then else 1.0,
        gain=1 - then / now if now else 0.0,
        moves=moves,
        move_bytes=size,
        seconds=size / options.bytes_per_second,
        layers=layers,
    )


def _best(slices: np.ndarray, current: Placement, sizes: SlotSizes, options: Options) -> Placement:
    """Of both algorithms' placements the better balanced; if both are alike, the one with fewer
    moves."""
    total = slices.sum(axis=0).astype(np.float64)
    candidates = [
        rebalance(
            total.tolist(),
            sizes.total,
            sizes.ranks,
            groups=options.groups,
            nodes=options.nodes,
            most=sizes.width,
            apart=True,
        )
    ]
    if sizes.spare:
        candidates.append(rebalance_slices(slices.T, sizes))
    mean = float(np.mean(rank_loads(current, total, sizes.ranks)))
    found = []
    for candidate in candidates:
        target = aligned(current, candidate, sizes.ranks, options.nodes)
        most = float(np.max(rank_loads(target, total, sizes.ranks)))
        found.append((most, _copies(plan_rounds(current, target, sizes.ranks)), target))
    least = min(most for most, _, _ in found)
    return min(
        (each for each in found if each[0] <= least + CLOSE * mean), key=lambda each: each[1]
    )[2]


def _copies(rounds: list[Round]) -> int:
    return sum(len(each.copies) for each in rounds)


def balances(counts: Mapping[int, np.ndarray]) -> dict[int, float]:
    """Layer → mean ÷ max of the ranks' tokens.

    Args:
      counts: layer → tokens [ranks, experts].
    """
    return {layer: balance_of(ranks.sum(axis=1)) for layer, ranks in counts.items()}


def imbalance(tokens: Mapping[int, Sequence[int]]) -> float | None:
    """The busiest expert's tokens over the mean, averaged over the layers with tokens.

    1: all experts are equally busy; the number of experts: one gets everything. None: no tokens.
    """
    ratios = [max(own) * len(own) / sum(own) for own in tokens.values() if sum(own)]
    return sum(ratios) / len(ratios) if ratios else None
