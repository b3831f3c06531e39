"""Experts of an ffn runtime as an attention runtime sees them; the link is a function here."""

import queue
from unittest.mock import Mock

import pytest

from jaxserve.config.sections import Experts
from jaxserve.errors import EngineFailedError
from jaxserve.fleet.expert_answers import PassLog, answer
from jaxserve.fleet.remote_experts import RemoteExperts
from jaxserve.link.remote.batching import Turns
from jaxserve.model.ffn.placement import SlotSizes, home_slots
from jaxserve.observe.view import FFNWorkerView
from jaxserve.roles.expert_balancer import ExpertBalancer, ExpertFacts
from jaxserve.roles.expert_view import ExpertView
from jaxserve.roles.worker import MoveExperts
from tests.jaxserve.waiting import until

SIZES = SlotSizes(4, 2, 1)
HOME = home_slots(SIZES)  # 0 1 -, 2 3 -
MOVED = (0, 1, 2, 2, 3, 0)


class Workers:
    """Ffn workers, one after the other."""

    def __init__(self):
        self.up = True
        self.begin("a")

    def begin(self, name, sizes=SIZES):
        settings = Experts(move_gb_per_second=1e6)
        self.balancer = ExpertBalancer(ExpertFacts([1], sizes, 100), settings, self._none)
        self.policy = Turns(most=4)
        self.policy._domains = {"a": 1, "b": 2}
        self.log = PassLog(self.policy)
        self.log.name = name

    def ask(self, question, seconds):
        if not self.up:
            raise EngineFailedError("no ffn worker is up")
        return answer(self.balancer, self.log, question)

    def moved(self, slots=MOVED):
        """Puts the experts into these slots."""
        self.balancer.place({1: slots})
        self.serve()

    def serve(self, most=100):
        """Carries out so many actions."""
        done = 0
        while self.balancer.view().moving and done < most:
            actions = self.balancer.due()
            self.balancer.carried_out(actions)
            done += sum(isinstance(action, MoveExperts) for action in actions)

    def _none(self, number, seconds):
        raise EngineFailedError("no counts")


@pytest.fixture
def workers():
    return Workers()


@pytest.fixture
def experts(workers):
    return RemoteExperts(workers.ask)


def test_a_worker_that_begins_anew_gets_the_last_placement(workers, experts):
    experts.look()
    workers.moved()
    experts.look()
    assert (experts.view().epoch, experts.view().moves) == (1, 2)
    workers.up = False
    with pytest.raises(EngineFailedError, match="no ffn worker is up"):
        experts.look()
    assert experts.view().epoch == 1
    workers.up = True
    workers.begin("b")
    assert workers.balancer.placements == {1: HOME}
    experts.look()
    assert experts.view().moving == 1
    workers.serve()
    assert workers.balancer.placements == {1: MOVED}
    experts.look()
    assert not workers.balancer.view().moving


def test_a_worker_lost_in_the_middle_gets_what_was_done(workers, experts):
    swapped = (2, 3, 0, 0, 1, 2)
    workers.balancer.place({1: swapped})
    workers.serve(1)
    middle = workers.balancer.placements[1]
    assert middle not in (HOME, swapped)
    experts.look()
    workers.begin("b")
    experts.look()
    workers.serve()
    assert sorted(workers.balancer.placements[1][:3]) == sorted(middle[:3])
    assert sorted(workers.balancer.placements[1][3:]) == sorted(middle[3:])


@pytest.mark.parametrize("looks", [1, 2])
def test_workers_that_are_lost_on_the_way_leave_the_placement_to_the_next(workers, looks):
    """However often, and with two attention runtimes, of which one or both look."""
    runtimes = [RemoteExperts(workers.ask), RemoteExperts(workers.ask)]
    workers.moved()
    for experts in runtimes:
        experts.look()
    for name in "bcd":
        workers.begin(name)
        for _ in range(looks):
            for experts in runtimes:
                experts.look()
        assert workers.balancer.view().moving == 1
    workers.begin("e")
    runtimes[1].look()
    runtimes[0].look()
    workers.serve()
    assert workers.balancer.placements == {1: MOVED}
    for experts in runtimes:
        experts.look()
        assert experts._remembered.worker == "e"
    assert not workers.balancer.view().moving


def test_a_placement_that_a_worker_gives_up_is_told_again(workers, experts):
    workers.moved()
    experts.look()
    workers.begin("b")
    experts.look()
    workers.balancer._drop_rounds()
    experts.look()
    workers.serve()
    assert workers.balancer.placements == {1: MOVED}


@pytest.mark.parametrize("sizes", [[SlotSizes(4, 1, 1)], []], ids=["does not fit", "moved on"])
def test_a_placement_is_told_once(workers, experts, sizes):
    """The worker has fewer slots now, or has moved experts since."""
    workers.moved()
    experts.look()
    workers.begin("b", *sizes)
    if not sizes:
        workers.moved((1, 0, 3, 2, 3, 1))
    experts.look()
    assert experts._remembered.worker == "b"
    assert not workers.balancer.view().moving


def test_a_look_that_fails_in_any_way_is_followed_by_others(workers):
    answers, failures = queue.Queue(), [RuntimeError("dictionary changed size")]

    def ask(question, seconds):
        if failures:
            answers.put("failed")
            raise failures.pop()
        answers.put("answered")
        return workers.ask(question, seconds)

    experts = RemoteExperts(ask, seconds=0.001)
    experts.start()
    found = [answers.get(timeout=10) for _ in range(3)]
    experts.close()
    assert found == ["failed", "answered", "answered"]


def test_what_goes_wrong_is_said(workers, experts):
    for error in (EngineFailedError("no counts within 5 s"), ValueError("1 rounds of moves")):
        workers.balancer.rebalance = Mock(side_effect=error)
        with pytest.raises(type(error), match=str(error)):
            experts.rebalance(dry_run=False)
    with pytest.raises(EngineFailedError, match="truncated"):
        RemoteExperts(lambda question, seconds: b"").look()
    experts.close()


def test_passes_are_counted_and_measured_once_somebody_has_asked(workers):
    experts = RemoteExperts(workers.ask, where=lambda: "ffn:9300")
    workers.log.add(1, 1, 8, Mock())
    experts.look()
    workers.log.add(2, 2, 16, Mock())
    workers.policy.left_behind, workers.policy.misjudged = 3, 0.5
    found, spans = experts.passes(1.0)
    counts = {"passes": 2, "messages": 3, "rows": 24, "places": 4, "left_behind": 3}
    assert found == FFNWorkerView(name="ffn:9300", misjudged=0.5, **counts)
    assert spans == []
    workers.log.add(3, 1, 4, Mock())
    until(lambda: experts.passes(1.0)[1], 10)
    (span,) = experts.passes(1.0)[1]
    assert (span.stage, span.layer, span.step, span.fill) == ("ffn", 3, 3, (1, 2, 3))


def test_a_model_without_experts_has_passes_and_refuses_to_move_any(workers, experts):
    workers.balancer = None
    workers.log.add(0, 2, 16, None)
    found = FFNWorkerView(passes=1, messages=2, rows=16, places=2)
    assert (experts.passes(1.0), experts.view()) == ((found, []), ExpertView())
    with pytest.raises(ValueError, match="the model has no experts to move"):
        experts.rebalance(dry_run=True)
