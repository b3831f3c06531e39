"""Moves that turn one placement of experts into another, planned where experts are balanced.

Processes that only carry moves out (`roles/expert_slots.py`) do not import this module.
"""

from collections.abc import Sequence

from jaxserve.model.ffn.placement import EMPTY, ExpertCopy, MoveRound, Placement, replica_counts


def aligned(current: Placement, target: Sequence[int], ranks: int) -> Placement:
    """Renames ranks and reorders the slots of a rank in the target, so that many experts stay where
    they are. The ranks with most experts in common are matched first."""
    local = len(current) // ranks
    held = [current[r * local : (r + 1) * local] for r in range(ranks)]
    wanted = [target[r * local : (r + 1) * local] for r in range(ranks)]
    common = {
        (rank, other): len(set(held[rank]) & set(wanted[other]) - {EMPTY})
        for rank in range(ranks)
        for other in range(ranks)
    }
    names: dict[int, int] = {}
    for rank, other in sorted(common, key=lambda pair: (-common[pair], pair[0] != pair[1])):
        if rank not in names and other not in names.values():
            names[rank] = other
    slots = [_in_place(held[rank], wanted[names[rank]]) for rank in range(ranks)]
    return tuple(expert for rank in slots for expert in rank)


def _in_place(held: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """Orders a rank's wanted experts; those that the rank holds already stay in their slots."""
    left = list(wanted)
    slots: list[int | None] = [None] * len(held)
    for place, expert in enumerate(held):
        if expert in left:
            slots[place] = expert
            left.remove(expert)
    rest = iter(sorted(left, reverse=True))
    return [next(rest) if expert is None else expert for expert in slots]


def plan_rounds(current: Placement, target: Placement, ranks: int) -> list[MoveRound]:
    """Plans the rounds that turn one placement into another, up to the order of a rank's slots.
    After each round every expert has a slot, so any round can be the last. A slot that becomes
    empty is merely no longer used, so the last round may have no copies.

    Args:
      target: aligned to `current`.
    """
    now, local = list(current), len(current) // ranks
    rounds = []
    while True:
        cuts = [slice(rank * local, (rank + 1) * local) for rank in range(ranks)]
        target = tuple(slot for own in cuts for slot in _in_place(now[own], target[own]))
        pending = [slot for slot, expert in enumerate(target) if expert not in (EMPTY, now[slot])]
        if not pending:
            break
        copies = _overwrites(now, target, pending, local) or _swap(now, target, pending)
        before = list(now)
        for copy in copies:
            now[copy.target] = before[copy.source]
        rounds.append(MoveRound(tuple(copies), tuple(now)))
    if rounds and rounds[-1].copies:
        rounds[-1] = rounds[-1]._replace(placement=target)
    elif target != current:
        rounds.append(MoveRound((), target))
    return rounds


def _overwrites(
    now: Sequence[int], target: Sequence[int], pending: Sequence[int], local: int
) -> list[ExpertCopy]:
    """Returns copies into slots that are empty or whose expert also has another slot."""
    counts = replica_counts(now, max(now) + 1)
    taken, copies = set(), []
    for slot in pending:
        expert, rank = now[slot], slot // local
        if rank in taken or (expert != EMPTY and counts[expert] < 2):
            continue
        taken.add(rank)
        if expert != EMPTY:
            counts[expert] -= 1
        copies.append(ExpertCopy(now.index(target[slot]), slot))
    return copies


def _swap(now: Sequence[int], target: Sequence[int], pending: Sequence[int]) -> list[ExpertCopy]:
    """Swaps two experts, for the case that every pending slot has an expert's only replica. One of
    them reaches its place, on another rank, since otherwise its own rank would have kept it."""
    slot = pending[0]
    other = next(place for place in pending if target[place] == now[slot])
    return [ExpertCopy(slot, other), ExpertCopy(other, slot)]
