import random

from jaxserve.model.ffn.move_rounds import aligned, plan_rounds
from jaxserve.model.ffn.placement import EMPTY, ExpertCopy, MoveRound, SlotSizes, check_placement
from tests.jaxserve.model.ffn.test_placement import random_placement


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
