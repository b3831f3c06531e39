"""Experts that move between slots of simulated devices, in every format of weights."""

import dataclasses
import functools
import random
import time

import jax
import numpy as np
import pytest

from jaxserve.checkpoint.conversion import convert
from jaxserve.checkpoint.families import architecture
from jaxserve.checkpoint.opening import open_checkpoint
from jaxserve.checkpoint.random_leaves import RandomLeaves
from jaxserve.checkpoint.step3 import step3_names
from jaxserve.errors import EngineFailedError
from jaxserve.model.ffn.move_rounds import aligned, plan_rounds
from jaxserve.model.ffn.placement import EMPTY, home_slots
from jaxserve.roles.colocated import ColocatedPrograms, ColocatedWeights
from jaxserve.roles.expert_slots import counts_of_ranks, open_slots
from jaxserve.roles.ffn import FFNPrograms, FFNWeights
from jaxserve.roles.held_weights import HeldWeights
from jaxserve.roles.worker import STORAGE, CountExperts, FetchExperts, MoveExperts, ReadExperts
from tests.jaxserve import layouts
from tests.jaxserve.checkpoint.test_peer import from_peers, serving
from tests.jaxserve.model.ffn.test_placement import random_placement
from tests.jaxserve.roles.building import CONFIG, programs_of
from tests.reference.tiny_step3 import write_tiny_step3

pytestmark = pytest.mark.unoptimised

NAMES = step3_names(CONFIG)
AFD = {"ffn.ep": 3, "ffn.tp": 2, "ffn.redundant_slots": 1}
COLOCATED = {**layouts.COLOCATED, "attention.dp": 4, "ffn.redundant_slots": 1}


def make(tmp_path, overrides, source=None, config=CONFIG):
    deployment = layouts.deployment(tmp_path, overrides)
    colocated = ColocatedPrograms, ColocatedWeights
    kind, load = colocated if deployment.mode == "colocated" else (FFNPrograms, FFNWeights)
    programs, source = programs_of(kind, deployment, config), source or RandomLeaves()
    weights = load(source, NAMES, programs)
    return (
        open_slots(programs.experts, programs.banks, weights, NAMES, source),
        weights,
        programs.experts.pieces,
    )


def contents(slots, weights, layer):
    """Every slot's part of every leaf, as bytes."""
    number = next(n for n, bank in enumerate(slots.banks) if layer in bank.layers)
    index = slots.banks[number].layers.index(layer)
    found = [b""] * slots.sizes.total
    for leaf in map(np.asarray, weights.of_slots(number)):
        leaf = leaf[index] if leaf.shape[0] != slots.sizes.total else leaf
        found = [own + leaf[slot].tobytes() for slot, own in enumerate(found)]
    return found


def change(slots, layer, target, pieces):
    """Carries all rounds out."""
    for copies, placement in plan_rounds(slots.placements[layer], target, slots.sizes.ranks):
        pairs = [tuple(copy) for copy in copies]
        for piece in range(pieces if pairs else 0):
            slots.carry_out(FetchExperts(layer, pairs, piece))
        slots.carry_out(MoveExperts(layer, pairs, list(placement)))


@pytest.mark.parametrize(
    ("overrides", "expected_pieces"),
    [
        (AFD, 1),
        pytest.param({**AFD, "experts.move_mb_per_step": 0.004}, 4, marks=pytest.mark.nightly),
        ({**AFD, "ffn.weights": "int8", "experts.move_mb_per_step": 1e-6}, 32),
        ({**AFD, "ffn.weights": "fp8", "experts.move_mb_per_step": 0.001}, 4),
        ({**AFD, "dtype": "bfloat16", "ffn.ep": 5, "ffn.tp": 1}, 1),
        ({**COLOCATED, "experts.move_mb_per_step": 0.01}, 3),
        ({**COLOCATED, "ffn.weights": "fp8"}, 1),
    ],
    ids=str,
)
def test_every_slot_holds_what_its_placement_says(overrides, expected_pieces, tmp_path):
    slots, weights, pieces = make(tmp_path, overrides)
    assert pieces == expected_pieces
    layer = slots.layers[-1]
    others = {n: contents(slots, weights, n) for n in slots.layers if n != layer}
    home = home_slots(slots.sizes)
    whole = contents(slots, weights, layer)
    experts = [whole[home.index(expert)] for expert in range(CONFIG.experts)]
    assert len(set(experts)) == CONFIG.experts
    draw = random.Random(1)
    for _ in range(4):
        wanted = random_placement(draw, slots.sizes)
        change(slots, layer, aligned(slots.placements[layer], wanted, slots.sizes.ranks), pieces)
        now = contents(slots, weights, layer)
        for slot, expert in enumerate(slots.placements[layer]):
            assert expert == EMPTY or now[slot] == experts[expert]
    assert {n: contents(slots, weights, n) for n in others} == others
    table = np.asarray(slots.tables[-1])[-1]
    assert table.shape == (CONFIG.experts, 1 + slots.sizes.width)
    placed = [slots.placements[layer].count(expert) for expert in range(CONFIG.experts)]
    assert table[:, 0].tolist() == [min(count, slots.sizes.width) for count in placed]


@pytest.mark.parametrize("source", [False, True], ids=["devices", "checkpoint"])
def test_the_shared_expert_stays_where_it_is(source, tmp_path):
    sizes = dataclasses.replace(layouts.SIZES, share_expert_dim=66)
    folder = write_tiny_step3(tmp_path, sizes)
    config = architecture(sizes.config())
    checkpoint = open_checkpoint(str(folder), step3_names(config))
    overrides = {"ffn.ep": 4, "ffn.redundant_slots": 1, "ffn.shared": "ranks:1"}
    slots, weights, pieces = make(folder, overrides, checkpoint, config)
    assert (slots.sizes.local, slots.sizes.total, slots.counts[0].shape) == (4, 12, (1, 4, 7))

    def whole():
        return [np.asarray(leaf) for leaf in weights.of_slots(0)]

    before, home = whole(), home_slots(slots.sizes)
    assert all(leaf[12:14].any() and not leaf[14:].any() for leaf in before)
    wanted = aligned(home, random_placement(random.Random(1), slots.sizes), 3)
    if source:
        read_into_place(slots, 1, home, wanted)
    else:
        change(slots, 1, wanted, pieces)
    for leaf, then in zip(whole(), before, strict=True):
        np.testing.assert_array_equal(leaf[12:], then[12:])
        for slot, expert in enumerate(slots.placements[1]):
            if expert != EMPTY:
                np.testing.assert_array_equal(leaf[slot], then[home.index(expert)])
    with pytest.raises(ValueError, match="or from nowhere"):
        slots.carry_out(MoveExperts(1, [(0, 12)], list(slots.placements[1])))


def wait_for(slots):
    while not slots.has_read():
        time.sleep(0.001)


@pytest.fixture(scope="module")
def converted(tiny_model, tmp_path_factory):
    """The model as an Orbax checkpoint a block."""
    folder = tmp_path_factory.mktemp("converted") / "model"
    convert(tiny_model, folder)
    return folder


@pytest.mark.parametrize(
    ("folder", "overrides"),
    [
        ("tiny_model", {**AFD, "ffn.weights": "int8"}),
        ("tiny_model", {**AFD, "ffn.ep": 5, "ffn.tp": 1}),
        ("tiny_model", COLOCATED),
        ("converted", AFD),
        ("converted", {**COLOCATED, "ffn.weights": "fp8"}),
    ],
    ids=str,
)
def test_experts_come_from_the_checkpoint(folder, overrides, request):
    """Slots have the same bytes as after loading."""
    folder = request.getfixturevalue(folder)
    slots, weights, _ = make(folder, overrides, open_checkpoint(str(folder), NAMES))
    layer, home = slots.layers[-1], home_slots(slots.sizes)
    before = contents(slots, weights, layer)
    wanted = random_placement(random.Random(1), slots.sizes)
    read_into_place(slots, layer, home, wanted)
    now = contents(slots, weights, layer)
    for slot, expert in enumerate(slots.placements[layer]):
        assert expert == EMPTY or now[slot] == before[home.index(expert)]


def test_experts_come_from_another_worker(tiny_model):
    """Which has them elsewhere: its slots are its own."""
    peer, theirs, pieces = make(
        tiny_model, {**AFD, "ffn.weights": "int8"}, open_checkpoint(str(tiny_model), NAMES)
    )
    layer = peer.layers[-1]
    wanted = random_placement(random.Random(3), peer.sizes)
    change(peer, layer, aligned(peer.placements[layer], wanted, peer.sizes.ranks), pieces)
    with serving(tiny_model, HeldWeights(theirs.held, peer)) as address:
        overrides = {"weights.peers": [address], "experts.source": "peer", "ffn.weights": "int8"}
        source = from_peers(tiny_model, address)
        slots, weights, _ = make(tiny_model, {"ffn.ep": 5, **overrides}, source)
        home, before = home_slots(slots.sizes), contents(slots, weights, layer)
        swapped = tuple(home[slot] for slot in (2, 1, 0, *range(3, slots.sizes.total)))
        read_into_place(slots, layer, home, swapped)
        assert source.arrays.keys() == {address}
        source.close()
    now = contents(slots, weights, layer)
    assert (now[2], now[0]) == (before[0], before[2])
    assert before[0] != before[2]
    # Where it is gone, they come from storage.
    source._again = 0.0
    read_into_place(slots, layer, swapped, home)
    assert contents(slots, weights, layer) == before
    assert source.arrays["storage"] > 0


def read_into_place(slots, layer, now, then):
    """Carries all rounds out, with what is read."""
    for copies, placement in plan_rounds(now, then, slots.sizes.ranks):
        targets = [target for _, target in copies]
        slots.carry_out(ReadExperts(layer, [(placement[target], target) for target in targets]))
        wait_for(slots)
        moved = [(STORAGE, target) for target in targets]
        slots.carry_out(MoveExperts(layer, moved, list(placement)))


def test_what_cannot_be_read_is_said_and_changes_nothing(tiny_model):
    slots, weights, _ = make(tiny_model, AFD, open_checkpoint(str(tiny_model), NAMES))
    before, read = (contents(slots, weights, 1), slots.placements[1]), slots._read_experts
    programs, _, source = read.args
    slots._read_experts = functools.partial(read.func, programs, None, source)
    slots.carry_out(ReadExperts(1, [(0, 3)]))
    wait_for(slots)
    assert slots.unread.startswith("process 0: AttributeError: ")
    slots.carry_out(CountExperts(1))
    assert slots.read_counts(1).unread == slots.unread
    with pytest.raises(ValueError, match="nothing was read"):
        slots.carry_out(MoveExperts(1, [(STORAGE, 3)], list(before[1])))
    assert (contents(slots, weights, 1), slots.placements[1]) == before
    slots._read_experts = read
    slots.carry_out(ReadExperts(1, [(0, 3)]))
    wait_for(slots)
    assert slots.unread == ""


def test_what_cannot_be_is_refused_and_changes_nothing(tmp_path):
    slots, weights, _ = make(tmp_path, AFD)
    before = contents(slots, weights, 1), slots.placements[1]
    home = list(slots.placements[1])
    for move, problem in (
        (MoveExperts(0, [], home), "layer 0 has no experts"),
        (MoveExperts(1, [], [0] * len(home)), "no slot holds expert 1"),
        (MoveExperts(1, [(0, 1), (4, 2)], home), "more than one to a rank"),
        (MoveExperts(1, [(99, 1)], home), "or from nowhere"),
    ):
        with pytest.raises(ValueError, match=problem):
            slots.carry_out(move)
    assert (contents(slots, weights, 1), slots.placements[1]) == before


def test_counts_are_read_as_they_were(tmp_path):
    slots, _, _ = make(tmp_path, COLOCATED)
    slots.carry_out(CountExperts(1))
    first = slots.counted
    assert (first.number, first.counts.shape) == (1, (2, 4, 7))
    counts = np.arange(2 * 4 * 7, dtype=np.uint32).reshape(2, 4, 7)
    slots.counts = [jax.device_put(counts, slots.counts[0].sharding)]
    slots.carry_out(CountExperts(2))
    assert not any(part.any() for part in counts_of_ranks(first.counts).values())
    ranks, renewals, unread = slots.read_counts(2)
    assert (sorted(ranks), renewals, unread) == ([0, 1, 2, 3], 0, "")
    for rank, part in ranks.items():
        np.testing.assert_array_equal(part, counts[:, rank])
    with pytest.raises(EngineFailedError, match="the counts of number 1 were not taken"):
        slots.read_counts(1)


def test_counts_say_that_they_began_anew(tmp_path):
    """A snapshot describes the time when it was taken."""
    slots, _, _ = make(tmp_path, COLOCATED)
    slots.renew()
    slots.carry_out(CountExperts(1))
    slots.counts[0].delete()
    slots.renew()
    assert slots.read_counts(1).renewals == 0
    slots.carry_out(CountExperts(2))
    assert slots.read_counts(2).renewals == 1
    assert not any(part.any() for part in slots.read_counts(2).counts.values())
