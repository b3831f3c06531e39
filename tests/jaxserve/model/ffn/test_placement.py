import pytest

from jaxserve.model.ffn.placement import (
    EMPTY,
    SlotSizes,
    balance_of,
    check_placement,
    first_entries,
    home_slots,
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


def random_placement(draw, sizes):
    slots = [*range(sizes.experts)]
    slots += [draw.randint(EMPTY, sizes.experts - 1) for _ in range(sizes.spare)]
    draw.shuffle(slots)
    return tuple(slots)
