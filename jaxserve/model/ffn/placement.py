"""Placements of experts in slots: plain data.

Slots are physical experts, `local` of them on each rank, device after device; a placement names
the expert of every slot of one layer, or `EMPTY`. Several slots may hold one expert (replicas).
Ranks of the shared expert come behind those of the routed ones and are in no placement: what they
hold never moves. `move_rounds.py` turns one placement into another; `replicas.py` is the part that
runs on devices. Knows neither weights nor JAX.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

EMPTY = -1
"""Stands for an expert in slots that hold none."""

MOST_REPLICAS = 64
"""Most slots that may hold one expert, and so the widest table."""

Floats = Sequence[float] | np.ndarray
"""Numbers of items, in order."""

Placement = tuple[int, ...]
"""The expert of every slot of a layer."""


class SlotSizes(NamedTuple):
    """Number and division of the slots for the experts of a layer."""

    experts: int
    ranks: int
    """Ranks over which the slots are divided."""
    redundant: int = 0
    """Slots a rank beyond those that the experts need (`ffn.redundant_slots`)."""
    shared_ranks: int = 0
    """Further ranks, each of which holds the whole shared expert and no routed ones
    (`ffn.shared: ranks:n`)."""
    shared_parts: int = 0
    """Slots for the shared expert on each of those ranks: its parts, as wide as a routed expert."""

    @property
    def local(self) -> int:
        """Slots of a rank."""
        return -(-self.experts // self.ranks) + self.redundant

    @property
    def total(self) -> int:
        """Slots of all ranks of routed experts."""
        return self.ranks * self.local

    @property
    def all_ranks(self) -> int:
        """Ranks of routed experts, followed by those of the shared expert."""
        return self.ranks + self.shared_ranks

    @property
    def all_slots(self) -> int:
        """Slots of all ranks; stands for "nowhere" where a slot is expected."""
        return self.all_ranks * self.local

    @property
    def spare(self) -> int:
        """Slots for replicas, also those that are left over by an uneven division."""
        return self.total - self.experts

    @property
    def width(self) -> int:
        """Most slots that hold one expert; fixed, so that no change of placement recompiles."""
        return max(1, min(self.ranks, self.spare + 1, MOST_REPLICAS))


def home_slots(sizes: SlotSizes) -> Placement:
    """Returns the placement that a worker starts with: every expert once, in order, spread evenly
    over the ranks; the other slots are empty."""
    slots = [EMPTY] * sizes.total
    taken = [0] * sizes.ranks
    for expert in range(sizes.experts):
        rank = expert * sizes.ranks // sizes.experts
        slots[rank * sizes.local + taken[rank]] = expert
        taken[rank] += 1
    return tuple(slots)


def first_entries(sizes: SlotSizes) -> tuple[int, ...]:
    """Returns the initial entry of every slot of all ranks: the experts of `home_slots`, then the
    shared expert's parts, numbered after the routed experts."""
    parts = tuple(range(sizes.experts, sizes.experts + sizes.shared_parts))
    empty = (EMPTY,) * (sizes.local - sizes.shared_parts)
    return home_slots(sizes) + sizes.shared_ranks * (parts + empty)


def check_placement(placement: Sequence[int], sizes: SlotSizes) -> None:
    """Raises ValueError unless every expert has a slot."""
    if len(placement) != sizes.total:
        raise ValueError(f"a placement of {len(placement)} slots, not {sizes.total}")
    if wrong := [expert for expert in placement if not EMPTY <= expert < sizes.experts]:
        raise ValueError(f"a slot for expert {wrong[0]} of {sizes.experts}")
    counts = replica_counts(placement, sizes.experts)
    if missing := [expert for expert, count in enumerate(counts) if not count]:
        raise ValueError(f"no slot holds expert {missing[0]} ({len(missing)} such experts)")


def replica_counts(placement: Sequence[int], experts: int) -> list[int]:
    """Returns the number of slots that hold each expert."""
    counts = [0] * experts
    for expert in placement:
        if expert != EMPTY:
            counts[expert] += 1
    return counts


def replica_table(placement: Sequence[int], sizes: SlotSizes) -> np.ndarray:
    """Returns int32 [experts, 1 + width]: the number of an expert's replicas, then their slots,
    ascending. Unused entries repeat the first slot. Replicas beyond the width are not used.

    Raises:
      ValueError: see `check_placement`.
    """
    check_placement(placement, sizes)
    slots: list[list[int]] = [[] for _ in range(sizes.experts)]
    for slot, expert in enumerate(placement):
        if expert != EMPTY:
            slots[expert].append(slot)
    used = [own[: sizes.width] for own in slots]
    rows = [[len(own), *own, *own[:1] * (sizes.width - len(own))] for own in used]
    return np.asarray(rows, np.int32)


def rank_loads(placement: Sequence[int], counts: Floats, ranks: int) -> np.ndarray:
    """Returns the tokens of each rank if an expert's tokens are divided evenly over its replicas.

    Args:
      counts: tokens of each expert.
    """
    replicas = replica_counts(placement, len(counts))
    loads = np.zeros(ranks)
    local = len(placement) // ranks
    for slot, expert in enumerate(placement):
        if expert != EMPTY:
            loads[slot // local] += counts[expert] / replicas[expert]
    return loads


def balance_of(loads: Floats) -> float:
    """Returns mean ÷ max: 1 if all ranks are equally busy, or without tokens."""
    most = float(np.max(loads))
    return float(np.mean(loads)) / most if most > 0 else 1.0


class ExpertCopy(NamedTuple):
    """Copy of one expert's weights from slot to slot."""

    source: int
    target: int


class MoveRound(NamedTuple):
    """Copies made at once, at most one to each rank, and the placement afterwards. All sources are
    read before any target is written."""

    copies: tuple[ExpertCopy, ...]
    placement: Placement
