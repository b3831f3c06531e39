"""Passes run one after the other, in the order of the policy, and pause where they are asked to."""

import threading
from unittest.mock import Mock

import jax
import pytest

from jaxserve.link.remote.batching import Turns, Waiting
from jaxserve.link.remote.passes import Passes
from tests.jaxserve.waiting import until


def put(passes, domain, lane=0):
    passes.put(Waiting(domain, lane, 0, None, lane))


def ran(passes, result=None):
    """Takes a batch, whose result is this; returns its domains."""
    batch = passes.take()
    passes.enqueued(batch, result or Mock(__class__=jax.Array))
    return "".join(one.domain for one in batch)


@pytest.mark.parametrize(("shared", "waited"), [(True, 2), (False, 0)])
def test_the_devices_queue_is_short_where_domains_share(shared, waited):
    passes, results = Passes(Turns(), lambda: shared), [Mock(__class__=jax.Array) for _ in range(3)]
    results[0].block_until_ready.side_effect = RuntimeError("its domain's affair")
    for result in results:
        put(passes, "a")
        assert ran(passes, result) == "a"
    counts = [result.block_until_ready.call_count for result in results]
    assert counts == [1] * waited + [0] * (3 - waited)
    put(passes, "b")
    passes.enqueued(passes.take(), None)  # A failed pass ends.


def test_a_merged_pass_begins_once_the_one_before_has_ended():
    passes, ended = Passes(Turns(most=4), lambda: True), threading.Event()
    put(passes, "a")
    assert ran(passes, Mock(__class__=jax.Array, block_until_ready=ended.wait)) == "a"
    put(passes, "b")
    taken = []
    thread = threading.Thread(target=lambda: taken.append(ran(passes)))
    thread.start()
    put(passes, "c")
    assert not taken
    ended.set()
    thread.join(10)
    assert taken == ["bc"]


def test_an_action_is_carried_out_before_the_next_pass_and_says_how_it_ended():
    passes, done = Passes(Turns(), lambda: False), []

    def act() -> None:
        for action in (lambda: done.append(threading.current_thread()), lambda: 1 // 0):
            try:
                passes.between(action)
            except ZeroDivisionError as error:
                done.append(error)

    for domain in "ab":
        put(passes, domain)
    assert ran(passes) == "a"
    thread = threading.Thread(target=act)
    thread.start()
    until(lambda: passes._actions)
    assert ran(passes) == "b"
    assert done == [threading.current_thread()]
    until(lambda: passes._actions)
    put(passes, "c")
    assert ran(passes) == "c"
    thread.join(10)
    assert isinstance(done[1], ZeroDivisionError)
