"""Who is next where several domains have messages."""

import threading
from unittest.mock import Mock

import pytest

from jaxserve.link.remote.turns import Turns
from tests.jaxserve.waiting import until

SECONDS = 30.0


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
                until(lambda others=others: turns.waiting == others)

    with turns.take("first"):
        threads = [threading.Thread(target=run, args=(name,)) for name in messages]
        for number, thread in enumerate(threads, 1):
            thread.start()
            until(lambda number=number: turns.waiting == number)
    for thread in threads:
        thread.join(SECONDS)
    assert "".join(ran) == "abcabaaaa"


def test_whoever_had_a_turn_longest_ago_is_next():
    turns, ran = Turns(lambda: True), []

    def once(name):
        with turns.take(name):
            ran.append(name)

    for name in "abcb":
        once(name)
    with turns.take("x"):
        threads = [threading.Thread(target=once, args=(name,)) for name in "bcaxn"]
        for number, thread in enumerate(threads, 1):
            thread.start()
            until(lambda number=number: turns.waiting == number)
    for thread in threads:
        thread.join(SECONDS)
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
