"""Decisions of the expert balancer and when they are due; no devices."""

import threading
import time

import msgspec
import numpy as np
import pytest

from jaxserve.config.sections import Experts
from jaxserve.errors import EngineFailedError
from jaxserve.model.ffn.placement import SlotSizes, home_slots
from jaxserve.roles import expert_balancer
from jaxserve.roles.expert_balancer import ExpertBalancer, ExpertFacts, imbalance, propose
from jaxserve.roles.worker import (
    STORAGE,
    Counted,
    CountExperts,
    FetchExperts,
    MoveExperts,
    ReadExperts,
)
from tests.jaxserve.waiting import Clock, until

SIZES = SlotSizes(8, 4, 1)
HOME = home_slots(SIZES)
SWAPPED = tuple(HOME[slot] for slot in (0, 3, 2, 1, *range(4, 12)))
SKEWED = np.array([[800, 100, 100, 100, 100, 100, 100, 100]])


class Worker:
    """Carries out what is due, on a thread; its experts get `counts` between two looks."""

    def __init__(self, settings, slot_bytes=1000):
        self.clock, self.counted, self.moves = Clock(), {}, []
        self.total = np.zeros((4, 1, 8), np.uint32)
        self.renewals, self.unread = 0, ""
        self.failures = {}
        """Number of a count → the error with which reading it ends; -1: of any."""
        facts = ExpertFacts([1], SIZES, slot_bytes)
        self.balancer = ExpertBalancer(facts, settings, self.read, self.clock)
        self.decided, self._decide = 0, self.balancer._decide
        self.balancer._decide = self.decide
        self.balancer.start()

    def decide(self):
        try:
            self._decide()
        finally:
            self.decided = self.balancer._taken

    def read(self, number, seconds):
        if error := self.failures.get(-1) or self.failures.pop(number, None):
            raise error
        return self.counted[number]

    def boundary(self):
        actions = self.balancer.due()
        for action in actions:
            match action:
                case CountExperts(number):
                    counts = dict(enumerate(self.total.copy()))
                    self.counted[number] = Counted(counts, self.renewals, self.unread)
                case MoveExperts():
                    self.moves.append(action)
        self.balancer.carried_out(actions)
        return actions

    def rebalance(self, **options):
        """While boundaries go on."""
        found = []
        thread = self.asking(found, **options)
        while thread.is_alive():
            self.boundary()
            thread.join(0.001)
        return found[0]

    def asking(self, found, **options):
        """A thread that adds a rebalance's proposal or error."""

        def ask():
            try:
                found.append(self.balancer.rebalance(**options))
            except (EngineFailedError, ValueError) as error:
                found.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        return thread

    def serve(self, counts=SKEWED):
        self.total[0, 0] += counts[0].astype(np.uint32)

    def lose_a_step(self):
        """Loses the counts with it."""
        self.total[:] = 0
        self.renewals += 1

    def finish_moves(self):
        while self.balancer.view().moving:
            self.pass_seconds(1)

    def pass_seconds(self, seconds=0):
        """Waits for the counts that are asked for then."""
        self.clock.now += seconds
        self.boundary()
        self.wait_until_read()
        self.boundary()

    def wait_until_read(self):
        """Waits for the counts that were asked for, and for what is decided by them."""
        balancer = self.balancer

        def done():
            assert balancer._thread.is_alive()
            undecided = balancer._taken == balancer._got and self.decided < balancer._taken
            return balancer._got >= balancer._asked and not undecided

        until(done)


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
    facts = ExpertFacts([1, 2], SIZES, 10)
    settings = Experts(least_gain=0.05, move_gb_per_second=1e-7)
    even = np.full((2, 8), 50)
    proposal = propose({1: even, 2: SKEWED}, {1: HOME, 2: HOME}, facts, settings)
    (layer,) = proposal.layers
    assert layer.layer == 2
    assert layer.loads_now == [900, 200, 200, 200]
    assert max(layer.loads_then) <= 1500 / 4 * 1.15
    assert proposal.balance_now == pytest.approx((200 + 375) / (200 + 900))
    assert proposal.balance_then > 0.9
    assert proposal.gain == pytest.approx(1 - (200 + max(layer.loads_then)) / 1100)
    assert (proposal.move_bytes, proposal.seconds) == (layer.moves * 10, layer.moves / 10)
    reluctant = Experts(least_gain=0.9)
    assert propose({2: SKEWED}, {2: HOME}, facts, reluctant).layers == []
    idle = propose({2: SKEWED * 0}, {2: HOME}, facts, settings)
    assert idle.balance_now == idle.balance_then == 1.0


def test_one_rank_has_nothing_to_gain_from_replicas():
    """One rank has no program that would move any, either."""
    sizes = SlotSizes(8, 1, 1)
    facts, eager = ExpertFacts([1], sizes, 10), Experts(least_gain=0.0)
    assert propose({1: SKEWED}, {1: home_slots(sizes)}, facts, eager).layers == []


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
    assert balancer.place({1: SWAPPED}) == 1
    pairs, seen = [(1, 3), (3, 1)], []
    while balancer._rounds:
        seen.append(worker.boundary())
        assert worker.boundary() == []  # half a second, two quarters of experts, is not over
        worker.clock.now += 0.5
    pieces = [[FetchExperts(1, pairs, piece)] for piece in range(4)]
    assert seen == [*pieces, [MoveExperts(1, pairs, list(SWAPPED))]]
    assert balancer.placements[1] == SWAPPED


SWAPPING = ReadExperts(1, [(1, 3), (2, 1)])
SWAP = MoveExperts(1, [(STORAGE, 3), (STORAGE, 1)], list(SWAPPED))


def test_experts_from_the_checkpoint_are_waited_for(make):
    """Until this process has ended reading, and then until all say that they have."""
    worker = make(source="checkpoint", window_seconds=1e4)
    balancer, there = worker.balancer, []
    worker.pass_seconds()
    balancer._has_read = lambda: bool(there)
    balancer.place({1: SWAPPED})
    assert worker.boundary() == [SWAPPING]
    assert worker.boundary() == []
    there.append("both")
    assert worker.boundary() == [CountExperts(2)]
    worker.wait_until_read()
    assert worker.boundary() == [SWAP]
    assert balancer.placements[1] == SWAPPED


def test_a_round_that_a_process_could_not_read_is_dropped_everywhere(make):
    """The decision uses the counts asked for at the time of the reading, and no later ones."""
    worker = make(source="checkpoint", window_seconds=10)
    balancer = worker.balancer
    worker.unread = "process 3: OSError: no such file"  # of a round long ago
    worker.pass_seconds()
    worker.unread = ""
    balancer.place({1: SWAPPED})
    assert worker.boundary() == [SWAPPING]
    worker.unread = "process 3: OSError: no such file"
    assert worker.boundary() == [CountExperts(2)]
    worker.wait_until_read()
    assert worker.boundary() == []
    assert (balancer.view().moving, balancer.placements[1]) == (0, HOME)
    worker.pass_seconds(11)
    assert (worker.moves, balancer._slices[-1][1].sum()) == ([], 0)
    # Counts that did not come confirm nothing: they are asked for again.
    worker.unread = ""
    balancer.place({1: SWAPPED})
    assert worker.boundary() == [SWAPPING]
    worker.failures[4] = EngineFailedError("process 3 was late")
    assert worker.boundary() == [CountExperts(4)]
    worker.wait_until_read()
    assert worker.boundary() == [CountExperts(5)]
    worker.wait_until_read()
    assert worker.boundary() == [SWAP]


def test_periodic_and_with_hysteresis(make):
    worker = make(rebalance_seconds=100.0, window_seconds=10.0, least_gain=0.3)
    worker.pass_seconds()
    for _ in range(12):
        worker.serve(np.full((1, 8), 10))
        worker.pass_seconds(10)
    assert not worker.moves
    for _ in range(22):
        worker.serve()
        worker.pass_seconds(10)
    assert worker.moves


@pytest.mark.parametrize("error", [EngineFailedError, RuntimeError], ids=["gone", "lost"])
def test_counts_that_do_not_come_are_an_error_and_nothing_moves(make, error):
    """Those of a lost step cannot be read, either."""
    worker = make()
    worker.rebalance(dry_run=True)
    worker.failures[-1] = error("process 3 is gone")
    assert "process 3 is gone" in str(worker.rebalance(dry_run=False))
    assert not worker.moves
    worker.failures.clear()
    with pytest.raises(EngineFailedError, match=r"experts: no counts within 0\.01 s"):
        worker.balancer.rebalance(dry_run=True, seconds=0.01)
    worker.serve()
    assert worker.rebalance(dry_run=False).moves


def test_a_failure_is_the_answer_to_its_own_question(make):
    """Two rebalances wait; the second one has counts of its own."""
    worker = make()
    worker.pass_seconds()
    worker.serve()
    threads, answers = [], []
    for wanted in (2, 3):
        threads.append(worker.asking(answers, dry_run=True))
        until(lambda wanted=wanted: worker.balancer._wanted >= wanted)
    worker.failures[2] = EngineFailedError("process 3 was late")
    assert worker.boundary() == [CountExperts(2)]
    threads[0].join(10)
    assert [*map(str, answers)] == ["experts: process 3 was late"]
    worker.pass_seconds()
    threads[1].join(10)
    assert answers[1].moves > 0


def test_a_rebalance_that_finds_a_look_on_its_way_gets_what_it_counts(make):
    worker = make(window_seconds=1e9)
    worker.rebalance(dry_run=True)
    worker.serve()
    worker.clock.now += expert_balancer.LOOK_SECONDS
    worker.balancer.view()
    looks = worker.balancer.due()
    assert len(looks) == 1
    worker.counted[looks[0].number] = Counted(dict(enumerate(worker.total.copy())))
    found = []
    thread = worker.asking(found, dry_run=True)
    until(lambda: worker.balancer._wanted == looks[0].number)
    worker.balancer.carried_out(looks)
    thread.join(10.0)
    assert found[0].moves > 0


def test_counts_that_a_lost_step_took_along_begin_anew(make):
    worker = make(window_seconds=10)
    balancer = worker.balancer
    worker.pass_seconds()
    for _ in range(3):
        worker.serve()
        worker.pass_seconds(10)
    worker.lose_a_step()
    worker.serve(SKEWED // 100)
    for _ in range(3):
        worker.pass_seconds(10)
        worker.serve()
    kept = [part[1].sum() for part in balancer._slices]
    assert kept == [1500, 1500, 1500, 1500, 1500]
    assert balancer.view().expert_tokens == {1: SKEWED[0].tolist()}


def test_an_operators_rebalance_comes_before_the_automatic_one(make, monkeypatch):
    """Between its decision and its first move."""
    worker = make(rebalance_seconds=10.0, window_seconds=10.0)
    balancer, placed = worker.balancer, []
    worker.pass_seconds()

    def late(*arguments):
        proposal = propose(*arguments)
        if not placed:
            placed.append(balancer.place({1: SWAPPED}))
        return proposal

    monkeypatch.setattr(expert_balancer, "propose", late)
    worker.serve()
    worker.pass_seconds(10)
    worker.finish_moves()
    assert (placed, balancer.placements[1]) == ([1], SWAPPED)
    worker.serve()
    worker.pass_seconds(10)
    assert balancer.view().moving  # it decides again
    assert balancer._thread.is_alive()


def test_what_was_proposed_for_another_placement_is_not_begun(make, monkeypatch):
    """All moves of another rebalance came and went meanwhile."""
    worker = make(window_seconds=1e4)
    balancer = worker.balancer
    worker.rebalance(dry_run=True)
    worker.serve()

    def late(*arguments):
        proposal = propose(*arguments)
        balancer.place({1: SWAPPED})
        while balancer._rounds:
            worker.clock.now += 1
            time.sleep(0.001)
        return proposal

    monkeypatch.setattr(expert_balancer, "propose", late)
    assert "experts have moved since" in str(worker.rebalance(dry_run=False))
    assert balancer.placements[1] == SWAPPED


def test_rebalances_by_hand_beside_automatic_ones(make):
    """Every third round with a process that cannot read, every fourth with a lost step."""
    worker = make(rebalance_seconds=1.0, window_seconds=1.0, source="checkpoint")
    balancer, draw, answers = worker.balancer, np.random.default_rng(1), []
    worker.pass_seconds()
    for number in range(1, 41):
        worker.unread = "" if number % 3 else "process 1: OSError: no such file"
        if not number % 4:
            worker.lose_a_step()
        worker.serve(draw.permuted(SKEWED, axis=1))
        worker.clock.now += 2
        answers.append(worker.rebalance(dry_run=False))
        for _ in range(4 if number % 2 else 40):
            worker.pass_seconds(0.01)
        assert balancer._thread.is_alive()
    worker.unread = ""
    worker.finish_moves()
    assert sorted({type(answer).__name__ for answer in answers}) == ["Proposal", "ValueError"]
    placement, kept = home_slots(SIZES), balancer.placements[1]
    for move in worker.moves:
        assert sorted(set(move.placement)) in ([*range(8)], [-1, *range(8)])
        placement = tuple(move.placement)
    assert placement == kept


def test_who_looks_sees_what_a_slice_has_so_far(make):
    worker = make(window_seconds=60.0)
    worker.pass_seconds()
    balancer = worker.balancer
    worker.serve()
    worker.pass_seconds(2)
    assert balancer.view().expert_tokens == {}  # nobody had looked
    worker.pass_seconds()
    view = balancer.view()
    assert view.expert_tokens == {1: SKEWED[0].tolist()}
    assert view.imbalance == pytest.approx(800 / 1500 * 8)
    assert not balancer._slices
    worker.serve()
    worker.pass_seconds(58)
    assert balancer.view().expert_tokens == {1: (2 * SKEWED[0]).tolist()}
    (kept,) = balancer._slices
    assert kept[1].sum(axis=0).tolist() == (2 * SKEWED[0]).tolist()
