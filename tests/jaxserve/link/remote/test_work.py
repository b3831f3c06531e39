"""Order of domains whose messages wait, and getting ready for domains that join."""

import threading
from unittest.mock import Mock

import pytest

from jaxserve.link.dispatch.contract import MessageSize
from jaxserve.link.remote.work import MOST_SIZES, Preparations, Turns
from jaxserve.link.session.hello import Refusal
from tests.jaxserve.waiting import until


class Work:
    """Compiles what it is asked for, unless it `fails`."""

    def __init__(self) -> None:
        self.fails = ""
        self.compiled: set[MessageSize] = set()

    def ready(self, sizes):
        return self.compiled.issuperset(sizes)

    def compile(self, sizes):
        if self.fails:
            raise OSError(self.fails)
        self.compiled.update(sizes)

    def warm_up(self, sizes):
        pass


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
def ask(work):
    """Asks, waits for what that begins, and returns the refusal and whether to come back."""
    preparations = Preparations(work, Turns(lambda: False))

    def ask(pieces, rows):
        try:
            return preparations.ask(pieces, rows)
        except Refusal as refusal:
            return str(refusal), refusal.later
        finally:
            for thread in list(preparations._threads.values()):
                thread.join(10)

    return ask


def test_a_failure_is_told_and_the_next_to_ask_has_it_tried_again(work, ask):
    compiles = "compiles for messages of 2 pieces of 3, 5 rows", True
    work.fails = "no space left"
    assert ask(2, [5, 3]) == compiles
    problem = "no programs for messages of 2 pieces of 3, 5 rows: OSError: no space left"
    assert ask(2, [5, 3]) == (problem, False)
    work.fails = ""
    assert ask(2, [5, 3]) == compiles
    assert ask(2, [5, 3]) is None


def test_sizes_that_failed_leave_room_for_others(work, ask):
    work.fails = "no space left"
    ask(1, range(1, MOST_SIZES + 1))
    work.fails = ""
    assert ask(2, [7]) == ("compiles for messages of 2 pieces of 7 rows", True)
    assert ask(2, [7]) is None
    ask(3, range(1, MOST_SIZES))
    assert ask(4, [1]) == ("4 pieces of 1 rows: more than 128 sizes of messages", False)


def take_turns(turns, run, names):
    """Runs these once all wait for a turn, in this order."""
    with turns.take("x"):
        threads = [threading.Thread(target=run, args=(name,)) for name in names]
        for number, thread in enumerate(threads, 1):
            thread.start()
            until(lambda number=number: len(turns._waiting) == number)
    for thread in threads:
        thread.join(30.0)


def test_a_busy_domain_lets_the_others_in_after_each_message():
    messages = {"a": 6, "b": 2, "c": 1}
    ran = []
    turns = Turns(lambda: True)

    def run(name):
        """Messages of a domain; with each turn, those of the others are there already."""
        for _ in range(messages[name]):
            with turns.take(name):
                ran.append(name)
                others = sum(ran.count(n) < messages[n] for n in messages if n != name)
                until(lambda others=others: len(turns._waiting) == others)

    take_turns(turns, run, messages)
    assert "".join(ran) == "abcabaaaa"


def test_whoever_had_a_turn_longest_ago_is_next():
    turns, ran = Turns(lambda: True), []

    def once(name):
        with turns.take(name):
            ran.append(name)

    for name in "abcb":
        once(name)
    take_turns(turns, once, "bcaxn")
    assert "".join(ran) == "abcb" + "nacbx"


@pytest.mark.parametrize(("shared", "waited"), [(True, 2), (False, 0)])
def test_the_queue_is_short_where_domains_share(shared, waited):
    turns = Turns(lambda: shared)
    results = [Mock(), Mock(), Mock()]
    for result in results:
        turns.enqueued(result)
    counts = [result.block_until_ready.call_count for result in results]
    assert counts == [1] * waited + [0] * (3 - waited)


def test_a_result_in_error_is_its_domain_s_affair():
    turns = Turns(lambda: True)
    turns.enqueued(Mock(block_until_ready=Mock(side_effect=RuntimeError("lost"))))
    turns.enqueued(Mock())


def test_an_error_in_a_turn_ends_it():
    turns = Turns(lambda: True)
    with pytest.raises(ValueError, match="no"), turns.take("a"):
        raise ValueError("no")
    with turns.take("b"):
        pass
