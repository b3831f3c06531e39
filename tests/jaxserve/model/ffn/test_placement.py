import random

import pytest

from jaxserve.model.ffn.placement import (
    EMPTY,
    ExpertCopy,
    MoveRound,
    SlotSizes,
    aligned,
    balance_of,
    check_placement,
    first_entries,
    home_slots,
    plan_rounds,
    rank_loads,
    replica_table,
)
from tests import golden


def test_homes_are_spread_in_order():
    golden.check_values("model/homes.txt", lambda *a: home_slots(SlotSizes(*a)), globals())


def test_sizes():
    def call(sizes):
        return sizes.local, sizes.total, sizes.spare, sizes.width

    golden.check_values("model/slot_sizes.txt", call, globals())


def test_the_shared_expert_has_slots_behind_those_of_the_placement():
    sizes = SlotSizes(5, 2, redundant=1, shared_ranks=3, shared_parts=2)
    assert (sizes.local, sizes.total, sizes.all_ranks, sizes.all_slots) == (4, 8, 5, 20)
    entries = first_entries(sizes)
    assert entries[:8] == home_slots(sizes) == (0, 1, 2, -1, 3, 4, -1, -1)
    assert entries[8:] == (5, 6, -1, -1) * 3
    deepseek = SlotSizes(256, 256, shared_ranks=32, shared_parts=1)
    assert first_entries(deepseek) == (*range(256), *[256] * 32)
    assert (deepseek.spare, deepseek.width) == (0, 1)


def test_table_counts_replicas_and_names_their_slots():
    sizes = SlotSizes(3, 3, 1)
    assert sizes.width == 3
    table = replica_table((0, 1, 2, 0, EMPTY, 0), sizes)
    assert table.dtype == "int32"
    assert table.tolist() == [[3, 0, 3, 5], [1, 1, 1, 1], [1, 2, 2, 2]]


@golden.table("model/placements.yaml")
def test_placements_that_lack_an_expert_are_refused(placement, problem):
    with pytest.raises(ValueError, match=problem):
        check_placement(placement, SlotSizes(3, 2))


def test_loads_divide_an_expert_over_its_replicas():
    loads = rank_loads((0, 1, 2, 0), [80, 10, 6], 2)
    assert loads.tolist() == [50, 46]
    assert balance_of(loads) == 0.96
    assert balance_of([0, 0]) == 1.0


def test_alignment_keeps_experts_where_they_are():
    # The ranks have changed names and each rank its order.
    assert aligned((0, 1, 2, 3, 4, 5), (5, 4, 0, 1, 3, 2), 3) == (0, 1, 2, 3, 4, 5)
    assert aligned((0, 1, EMPTY, 2, 3, EMPTY), (3, 2, 0, 1, 0, EMPTY), 2) == (0, 1, EMPTY, 2, 3, 0)
    assert aligned((0, 1, 2, 3), (2, 3, 1, 0), 4) == (0, 1, 2, 3)


def test_rounds_fill_empty_slots_first_and_free_what_is_left_over():
    # 0 and 1 are alone; 2 has two replicas, of which one gives way.
    assert plan_rounds((0, 2, 1, 2), (0, 1, 1, 2), 2) == [
        MoveRound((ExpertCopy(2, 1),), (0, 1, 1, 2))
    ]
    # Only the table changes.
    assert plan_rounds((0, 1, 1), (0, 1, EMPTY), 3) == [MoveRound((), (0, 1, EMPTY))]
    assert plan_rounds((0, 1), (0, 1), 2) == []
    # Only replicas change places.
    swap = MoveRound((ExpertCopy(1, 2), ExpertCopy(2, 1)), (0, 2, 1, 3))
    assert plan_rounds((0, 1, 2, 3), (0, 2, 1, 3), 2) == [swap]


def test_every_round_leaves_a_placement():
    draw = random.Random(4)
    for _ in range(300):
        ranks = draw.choice((1, 2, 3, 4, 6))
        sizes = SlotSizes(draw.randint(1, 12), ranks, draw.randint(0, 2))
        start, end = (random_placement(draw, sizes) for _ in range(2))
        target = aligned(start, end, ranks)
        assert sorted(target) == sorted(end)
        now = start
        rounds = plan_rounds(start, target, ranks)
        for copies, placement in rounds:
            into = [copy.target // sizes.local for copy in copies]
            assert len(set(into)) == len(into)
            moved = list(now)
            for copy in copies:
                assert now[copy.source] != EMPTY
                moved[copy.target] = now[copy.source]
            for have, says in zip(moved, placement, strict=True):
                assert says in (have, EMPTY)
            check_placement(placement, sizes)
            now = placement
        ends = [
            sorted(p[r * sizes.local :][: sizes.local]) for p in (now, target) for r in range(ranks)
        ]
        assert ends[:ranks] == ends[ranks:]
        # A slot is written once, or twice where two experts change places.
        assert sum(len(r.copies) for r in rounds) <= 2 * sizes.total


def random_placement(draw, sizes):
    slots = [*range(sizes.experts)]
    slots += [draw.randint(EMPTY, sizes.experts - 1) for _ in range(sizes.spare)]
    draw.shuffle(slots)
    return tuple(slots)
