"""What is decided, and when it is due; no devices."""

import threading

import msgspec
import numpy as np
import pytest

from jaxserve.config.sections import Experts
from jaxserve.errors import EngineFailedError
from jaxserve.model.ffn.placement import SlotSizes, home_slots
from jaxserve.roles.actions import (
    STORAGE,
    CountExperts,
    FetchExperts,
    MoveExperts,
    ReadExperts,
)
from jaxserve.roles.expert_balancer import ExpertBalancer, ExpertFacts
from jaxserve.roles.expert_policy import Options, imbalance, propose

SIZES = SlotSizes(8, 4, 1)
HOME = home_slots(SIZES)
SKEWED = np.array([[800, 100, 100, 100, 100, 100, 100, 100]])


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Worker:
    """Carries out what is due, on a thread; its experts get `counts` between two looks."""

    def __init__(self, settings, slot_bytes=1000):
        self.clock, self.counted, self.moves = Clock(), {}, []
        self.total = np.zeros((4, 1, 8), np.uint32)
        self.fails = ""
        facts = ExpertFacts([1], SIZES, slot_bytes)
        self.balancer = ExpertBalancer(facts, settings, self.read, self.clock)
        self.balancer.start()

    def read(self, number, seconds):
        if self.fails:
            raise EngineFailedError(self.fails)
        return self.counted[number]

    def boundary(self):
        actions = self.balancer.due()
        for action in actions:
            match action:
                case CountExperts(number):
                    self.counted[number] = dict(enumerate(self.total.copy()))
                case MoveExperts():
                    self.moves.append(action)
        self.balancer.carried_out(actions)
        return actions

    def rebalance(self, **options):
        """While boundaries go on."""
        found = []

        def ask():
            try:
                found.append(self.balancer.rebalance(**options))
            except (EngineFailedError, ValueError) as error:
                found.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        while thread.is_alive():
            self.boundary()
            thread.join(0.001)
        return found[0]

    def serve(self, counts=SKEWED):
        self.total[0, 0] += counts[0].astype(np.uint32)


@pytest.fixture
def make():
    workers = []

    def build(**settings):
        workers.append(Worker(Experts(**settings)))
        return workers[-1]

    yield build
    for worker in workers:
        worker.balancer.close()


def test_a_layer_is_left_alone_unless_it_gains():
    options = Options(least_gain=0.05, slot_bytes=10, bytes_per_second=100)
    even = np.full((2, 8), 50)
    proposal = propose({1: even, 2: SKEWED}, {1: HOME, 2: HOME}, SIZES, options)
    (layer,) = proposal.layers
    assert layer.layer == 2
    assert layer.loads_now == [900, 200, 200, 200]
    assert max(layer.loads_then) <= 1500 / 4 * 1.15
    assert proposal.balance_now == pytest.approx((200 + 375) / (200 + 900))
    assert proposal.balance_then > 0.9
    assert proposal.gain == pytest.approx(1 - (200 + max(layer.loads_then)) / 1100)
    assert (proposal.move_bytes, proposal.seconds) == (layer.moves * 10, layer.moves / 10)
    reluctant = Options(least_gain=0.9)
    assert propose({2: SKEWED}, {2: HOME}, SIZES, reluctant).layers == []
    assert propose({2: SKEWED * 0}, {2: HOME}, SIZES, options).balance_then == 1.0


def test_imbalance() -> None:
    assert imbalance({}) is None
    assert imbalance({0: [0, 0]}) is None
    assert imbalance({0: [5, 5, 5]}) == 1.0
    assert imbalance({0: [0, 0, 7]}) == 3.0
    assert imbalance({0: [0, 0, 7], 1: [1, 1, 1], 2: [0, 0, 0]}) == 2.0


def test_a_dry_run_moves_nothing(make):
    worker = make()
    worker.rebalance(dry_run=True)  # from here on it counts
    worker.serve()
    proposal = worker.rebalance(dry_run=True)
    assert proposal.balance_now == pytest.approx(375 / 900)
    assert proposal.moves
    assert not worker.moves
    assert worker.balancer.view().balance == pytest.approx(1500 / 4 / 1500)


def test_moves_are_paced_and_the_last_ends_an_epoch(make):
    worker = make(move_gb_per_second=1e-6, window_seconds=1e4)  # an expert a second
    worker.rebalance(dry_run=True)
    worker.serve()
    proposal = worker.rebalance(dry_run=False)
    while worker.balancer.view().moving:
        (move,) = worker.moves[-1:] or [None]
        before = len(worker.moves)
        worker.clock.now += 0.5 * (1 if move is None else len(move.copies))
        worker.boundary()
        assert len(worker.moves) <= before + 1
        worker.clock.now += 0.5 * (1 if move is None else len(move.copies))
        worker.boundary()
    assert sum(len(move.copies) for move in worker.moves) == proposal.moves
    assert worker.clock.now >= proposal.seconds - 4
    view = worker.balancer.view()
    assert (view.epoch, view.moves, view.move_bytes) == (1, proposal.moves, 1000 * proposal.moves)
    assert worker.balancer.placements[1] == tuple(worker.moves[-1].placement)
    assert view.loads_before == {1: [1500, 0, 0, 0]}  # all counted by the first rank


def test_a_boundary_carries_one_piece(make):
    worker = make(move_gb_per_second=1e-6, window_seconds=1e4)  # 1,000 bytes a second
    balancer = worker.balancer
    balancer.facts = msgspec.structs.replace(balancer.facts, pieces=4)
    worker.boundary()
    swapped = tuple(HOME[slot] for slot in (0, 3, 2, 1, *range(4, 12)))
    assert balancer.place({1: swapped}) == 1
    pairs, seen = [(1, 3), (3, 1)], []
    while balancer._rounds:
        seen.append(worker.boundary())
        assert worker.boundary() == []  # half a second, two quarters of experts, is not over
        worker.clock.now += 0.5
    pieces = [[FetchExperts(1, pairs, piece)] for piece in range(4)]
    assert seen == [*pieces, [MoveExperts(1, pairs, list(swapped))]]
    assert balancer.placements[1] == swapped


def test_experts_from_the_checkpoint_are_waited_for(make):
    worker = make(source="checkpoint", window_seconds=1e4)
    balancer, there = worker.balancer, []
    worker.boundary()
    balancer._has_read = lambda: bool(there)
    swapped = tuple(HOME[slot] for slot in (0, 3, 2, 1, *range(4, 12)))
    there.append("nothing to wait for")
    balancer.place({1: swapped})
    assert worker.boundary() == [ReadExperts(1, [(1, 3), (2, 1)])]
    there.clear()
    assert worker.boundary() == []
    there.append("both")
    pairs = [(STORAGE, 3), (STORAGE, 1)]
    assert worker.boundary() == [MoveExperts(1, pairs, list(swapped))]
    balancer.place({1: HOME})
    worker.boundary()

    def fails():
        raise EngineFailedError("no such file")

    balancer._has_read = fails
    assert worker.boundary() == []
    assert (balancer.view().moving, balancer.placements[1]) == (0, swapped)


def test_only_one_rebalance_at_a_time(make):
    balancer = make().balancer
    swapped = (1, 0, *HOME[2:])
    other = tuple(HOME[slot] for slot in (0, 3, 2, 1, *range(4, 12)))
    assert balancer.place({1: swapped}) == 0  # the order within a rank is nothing
    assert balancer.place({1: other}) == 1
    with pytest.raises(ValueError, match="1 rounds of moves are still to come"):
        balancer.place({1: HOME})


def test_periodic_and_with_hysteresis(make):
    worker = make(rebalance_seconds=100.0, window_seconds=10.0, least_gain=0.3)
    wait_for_counts(worker)
    for _ in range(12):
        worker.clock.now += 10
        worker.serve(np.full((1, 8), 10))
        wait_for_counts(worker)
    assert not worker.moves
    for _ in range(22):
        worker.clock.now += 10
        worker.serve()
        wait_for_counts(worker)
    assert worker.moves


def test_counts_that_do_not_come_are_an_error_and_nothing_moves(make):
    worker = make()
    worker.rebalance(dry_run=True)
    worker.fails = "process 3 is gone"
    assert "process 3 is gone" in str(worker.rebalance(dry_run=False))
    assert not worker.moves
    worker.fails = ""
    worker.serve()
    assert worker.rebalance(dry_run=False).moves


def test_who_looks_sees_what_a_slice_has_so_far(make):
    worker = make(window_seconds=60.0)
    wait_for_counts(worker)
    balancer = worker.balancer
    worker.serve()
    worker.clock.now += 2
    wait_for_counts(worker)
    assert balancer.view().expert_tokens == {}  # nobody had looked
    wait_for_counts(worker)
    view = balancer.view()
    assert view.expert_tokens == {1: SKEWED[0].tolist()}
    assert view.imbalance == pytest.approx(800 / 1500 * 8)
    assert not balancer._slices
    worker.serve()
    worker.clock.now += 58
    wait_for_counts(worker)
    assert balancer.view().expert_tokens == {1: (2 * SKEWED[0]).tolist()}
    (kept,) = balancer._slices
    assert kept[1].sum(axis=0).tolist() == (2 * SKEWED[0]).tolist()


def wait_for_counts(worker):
    worker.boundary()
    end = threading.Event()
    while worker.balancer._got < worker.balancer._asked:
        end.wait(0.001)
    worker.boundary()
