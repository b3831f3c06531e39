"""Algorithms that place experts by their numbers of tokens: pure functions, layer by layer.

`rebalance` is DeepSeek's EPLB (github.com/deepseek-ai/EPLB): all replicas are placed anew.
`rebalance_slices` is xDeepServe's (§4.5): experts stay at home and replicas take the spare slots,
chosen by the busiest expert of every slice of time. Called by the policy and by the planner.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxserve.model.ffn.placement import (
    EMPTY,
    Floats,
    Placement,
    SlotSizes,
    home_slots,
    rank_loads,
    replica_counts,
)


def pack(weights: Floats, packs: int) -> list[list[int]]:
    """Packs items, the same number in each pack: the heaviest first, each into the lightest pack.

    Args:
      weights: weights of the items; their number is a multiple of `packs`.
    """
    room = len(weights) // packs
    if room == 1:
        return [[item] for item in range(len(weights))]
    held: list[list[int]] = [[] for _ in range(packs)]
    loads = [0.0] * packs
    for item in sorted(range(len(weights)), key=lambda item: -weights[item]):
        best = min((p for p in range(packs) if len(held[p]) < room), key=loads.__getitem__)
        held[best].append(item)
        loads[best] += weights[item]
    return held


def replicate(weights: Floats, slots: int, most: int | None = None) -> list[int]:
    """Places every item once, in order, and in each further slot a replica of the item whose
    replicas carry the most.

    Args:
      most: most replicas of one item; None: any number.
    """
    loads = np.asarray(weights, np.float64)
    counts = np.ones(len(loads))
    items = list(range(len(loads)))
    for _ in range(slots - len(items)):
        carried = loads / counts
        if most is not None:
            carried = np.where(counts < most, carried, -1.0)
        item = int(np.argmax(carried))
        items.append(item)
        counts[item] += 1
    return items


def rebalance(
    counts: Floats, replicas: int, devices: int, *, most: int | None = None, apart: bool = False
) -> Placement:
    """DeepSeek's placement of one layer on one node: `replicas` slots, device after device.

    Experts are replicated, and the replicas packed onto the devices.

    Args:
      counts: tokens of each expert.
      most: replicas of one expert; None: any number.
      apart: keep two replicas of one expert off one device, where that is possible.

    Raises:
      ValueError: the slots do not hold all experts, or sizes do not divide each other.
    """
    counts = np.asarray(counts, np.float64).tolist()
    experts = len(counts)
    if replicas < experts or replicas % devices:
        raise ValueError(f"{experts} experts, {replicas} slots on {devices} devices")
    copies = replicate(counts, replicas, most)
    number = replica_counts(copies, experts)
    loads = [counts[copy] / number[copy] for copy in copies]
    packed = pack(loads, devices)
    if apart:
        _part(packed, copies, loads)
    return tuple(copies[place] for device in packed for place in device)


def _part(packs: list[list[int]], items: Sequence[int], loads: Floats) -> None:
    """Swaps places between packs until no pack has an item twice, or nothing helps. Each swap is
    the one that changes loads least."""
    for pack_index, held in enumerate(packs):
        for place, item in enumerate(held):
            mine = [items[other] for other in held]
            if items[item] not in mine[:place]:
                continue
            choices = [
                (abs(loads[other] - loads[item]), there, at)
                for there, others in enumerate(packs)
                if there != pack_index and items[item] not in [items[o] for o in others]
                for at, other in enumerate(others)
                if items[other] not in mine
            ]
            if choices:
                _, there, at = min(choices)
                held[place], packs[there][at] = packs[there][at], item


class Selection(NamedTuple):
    """Experts chosen for further replicas (xDeepServe §4.5)."""

    experts: list[int]
    """Chosen experts, in order."""
    loads: list[float]
    """Σ over slices of the busiest expert's tokens a replica: before and after each choice."""


def select_replicas(
    counts: Sequence[Floats] | np.ndarray, budget: int, most: int | None = None
) -> Selection:
    """Chooses, one by one, the expert whose further replica leaves the least total load.

    Candidates are the busiest experts of each slice, ties by lowest id.

    Args:
      counts: [experts][slices] tokens.
      budget: choices, at most: fewer where nothing helps any more.
      most: replicas of one expert.
    """
    tokens = np.asarray(counts, np.float64)
    replicas = np.ones(tokens.shape[0])
    total = _slice_load(tokens, replicas)
    chosen, loads = [], [total]
    for _ in range(budget):
        hottest = sorted(set(np.argmax(tokens / replicas[:, None], axis=0).tolist()))
        candidates = [e for e in hottest if most is None or replicas[e] < most]
        after = {e: _slice_load(tokens, replicas + _one(e, len(replicas))) for e in candidates}
        if not after or min(after.values()) >= total:
            break
        best = min(candidates, key=after.__getitem__)
        replicas[best] += 1
        total = after[best]
        chosen.append(best)
        loads.append(total)
    return Selection(chosen, loads)


def rebalance_slices(
    counts: Sequence[Floats] | np.ndarray, sizes: SlotSizes, budget: int | None = None
) -> Placement:
    """xDeepServe's placement of one layer. Homes stay. Chosen replicas go by load, heaviest first,
    to the least loaded rank with a free slot that does not have the expert yet.

    Args:
      counts: [experts][slices] tokens.
      budget: replicas beside the homes; None: all spare slots.
    """
    slots = list(home_slots(sizes))
    chosen = select_replicas(counts, sizes.spare if budget is None else budget, sizes.width).experts
    number = np.ones(sizes.experts)
    for expert in chosen:
        number[expert] += 1
    per_replica = np.asarray(counts, np.float64).sum(axis=1) / number
    loads = rank_loads(slots, per_replica.tolist(), sizes.ranks)
    for expert in sorted(chosen, key=lambda expert: (-per_replica[expert], expert)):
        free = [
            rank
            for rank in range(sizes.ranks)
            if EMPTY in (own := slots[rank * sizes.local : (rank + 1) * sizes.local])
            and expert not in own
        ]
        if not free:
            continue
        rank = min(free, key=loads.__getitem__)
        slots[slots.index(EMPTY, rank * sizes.local)] = expert
        loads[rank] += per_replica[expert]
    return tuple(slots)


def _slice_load(tokens: np.ndarray, replicas: np.ndarray) -> float:
    return float(np.max(tokens / replicas[:, None], axis=0).sum())


def _one(place: int, size: int) -> np.ndarray:
    return np.arange(size) == place
