import numpy as np
import pytest

from jaxserve.model.ffn.balance import pack, rebalance, rebalance_slices, replicate, select_replicas
from jaxserve.model.ffn.placement import SlotSizes, balance_of, check_placement, rank_loads

DEEPSEEK = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
"""The example in EPLB's README, layer by layer; its slots below are those of one node."""


@pytest.mark.parametrize(
    ("counts", "slots"),
    [
        (DEEPSEEK[0], (10, 6, 10, 7, 0, 2, 11, 4, 5, 9, 5, 4, 8, 3, 1, 1)),
        (DEEPSEEK[1], (1, 10, 2, 4, 5, 11, 5, 0, 6, 7, 6, 3, 8, 8, 9, 7)),
    ],
)
def test_the_documented_example_of_eplb(counts, slots):
    assert rebalance(counts, 16, 8) == slots


def test_pack_takes_the_heaviest_first():
    assert pack([1, 9, 5, 5], 2) == [[1, 0], [2, 3]]
    assert pack([1, 9, 5], 3) == [[0], [1], [2]]  # one each: nothing to choose
    assert pack([2, 2, 2, 2], 2) == [[0, 2], [1, 3]]  # ties in order


def test_replicate_divides_the_busiest():
    assert replicate([10, 4, 7], 6) == [0, 1, 2, 0, 2, 0]
    assert replicate([10, 4, 7], 6, most=2) == [0, 1, 2, 0, 2, 1]
    assert replicate([0, 0], 3) == [0, 1, 0]


def test_replicas_of_one_expert_on_different_devices():
    counts = [100, 1, 1, 1]
    together = rebalance(counts, 8, 2)
    assert together[:4].count(0) > 1
    # Four slots a device and at most one replica each.
    apart = rebalance(counts, 8, 2, most=2, apart=True)
    assert [sorted(apart[:4]), sorted(apart[4:])] == [[0, 1, 2, 3]] * 2


def test_layers_without_tokens_are_placed():
    check_placement(rebalance([0] * 6, 9, 3, most=3, apart=True), SlotSizes(6, 3, 1))
    check_placement(rebalance_slices([[0, 0]] * 6, SlotSizes(6, 3, 1)), SlotSizes(6, 3, 1))


@pytest.mark.parametrize(("replicas", "devices"), [(3, 1), (7, 2)])
def test_sizes_that_do_not_fit(replicas, devices):
    with pytest.raises(ValueError, match="4 experts, "):
        rebalance([1, 2, 3, 4], replicas, devices)


def test_selection_over_slices_of_time():
    counts = [[90, 10, 20], [10, 80, 20], [30, 30, 30], [5, 5, 60]]
    chosen, loads = select_replicas(counts, 4)
    assert chosen == [0, 1, 3, 0]
    assert loads == [230, 185, 145, 115, 100]


def test_selection_stops_where_nothing_helps():
    assert select_replicas([[0, 0], [0, 0]], 3).experts == []
    assert select_replicas([[9], [1]], 5, most=2).experts == [0]


def test_replicas_go_where_there_is_least():
    # Expert 0 gets both spare slots; its three replicas carry 30 each.
    counts = [[90], [10], [20], [5]]
    sizes = SlotSizes(4, 4, 1)
    # Three more replicas are budgeted; the fourth choice is expert 2, the busiest after expert 0.
    assert select_replicas(counts, 3, sizes.width).experts == [0, 0, 0]
    assert rebalance_slices(counts, sizes, budget=2) == (0, -1, 1, 0, 2, -1, 3, 0)
    # Each of two replicas carries half of its expert, so the second goes to the middle rank.
    assert rebalance_slices([[30], [50], [60]], SlotSizes(3, 3, 1)) == (0, 1, 1, 2, 2, -1)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("algorithm", ["eplb", "slices"])
def test_skewed_counts_become_even(seed, algorithm):
    draw = np.random.default_rng(seed)
    counts = draw.integers(50, 150, 32)
    counts[7] = 9 * counts.mean()
    sizes = SlotSizes(32, 8, 1)
    if algorithm == "eplb":
        slots = rebalance(counts, 40, 8, most=sizes.width, apart=True)
    else:
        slots = rebalance_slices(counts[:, None], sizes)
    check_placement(slots, sizes)
    for rank in range(8):
        own = [expert for expert in slots[rank * 5 : rank * 5 + 5] if expert >= 0]
        assert len(set(own)) == len(own)
    assert balance_of(rank_loads(slots, counts, 8)) >= 0.85
