"""Which experts should move, and what that would bring: pure functions of counts.

Called by `expert_balancer.py`, and by whoever wants a prediction. A layer is left alone unless its
busiest rank would get noticeably less to do (hysteresis): a move costs bandwidth and gains nothing
where the skew is noise.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxserve.config.sections import Experts
from jaxserve.model.ffn.balance import rebalance, rebalance_slices
from jaxserve.model.ffn.placement import (
    Placement,
    Round,
    aligned,
    balance_of,
    plan_rounds,
    rank_loads,
)
from jaxserve.roles.expert_moves import ExpertFacts, LayerProposal, Proposal

CLOSE = 0.02
"""Part of the mean by which the busiest rank of a placement with fewer moves may be busier."""


def propose(
    counts: Mapping[int, np.ndarray],
    placements: Mapping[int, Placement],
    facts: ExpertFacts,
    settings: Experts,
) -> Proposal:
    """Returns the best placement of every layer for the tokens that were counted.

    Args:
      counts: layer → tokens [slices of time, experts].
      placements: layer → the expert of every slot now.
    """
    sizes, layers, mean, now, then = facts.sizes, [], 0.0, 0.0, 0.0
    for layer, slices in sorted(counts.items()):
        current, total = placements[layer], slices.sum(axis=0).astype(np.float64)
        loads = rank_loads(current, total, sizes.ranks)
        mean, now = mean + float(np.mean(loads)), now + float(np.max(loads))
        target = _best(slices, current, facts)
        loads_then = rank_loads(target, total, sizes.ranks)
        if np.max(loads_then) >= (1 - settings.least_gain) * np.max(loads):
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
    size = moves * facts.slot_bytes
    return Proposal(
        balance_now=mean / now if now else 1.0,
        balance_then=mean / then if then else 1.0,
        gain=1 - then / now if now else 0.0,
        moves=moves,
        move_bytes=size,
        seconds=size / (settings.move_gb_per_second * 1e9),
        layers=layers,
    )


def _best(slices: np.ndarray, current: Placement, facts: ExpertFacts) -> Placement:
    """Returns the better balanced of both algorithms' placements; if both are alike, the one with
    fewer moves."""
    sizes, total = facts.sizes, slices.sum(axis=0).astype(np.float64)
    slots, ranks, width = sizes.total, sizes.ranks, sizes.width
    candidates = [rebalance(total.tolist(), slots, ranks, most=width, apart=True)]
    if sizes.spare:
        candidates.append(rebalance_slices(slices.T, sizes))
    mean = float(np.mean(rank_loads(current, total, sizes.ranks)))
    found = []
    for candidate in candidates:
        target = aligned(current, candidate, sizes.ranks)
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
