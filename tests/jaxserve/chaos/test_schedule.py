"""Faults are a function of the seed, and every pair of a kind and a role gets its turn."""

import itertools

from jaxserve.chaos.schedule import SECONDS, draw

VICTIMS = {"router": 1, "prefill": 2, "domain": 3}


def first(count, seed=1, kinds=("kill", "stop", "drop"), linked=("prefill", "domain")):
    return list(itertools.islice(draw(seed, kinds, VICTIMS, linked), count))


def test_the_seed_decides():
    assert first(40) == first(40)
    assert first(40) != first(40, seed=2)


def test_each_pair_once_a_round():
    pairs = [(fault.kind, fault.role) for fault in first(16)]
    expected = [(kind, role) for kind in ("kill", "stop") for role in VICTIMS]
    expected += [("drop", "prefill"), ("drop", "domain")]
    assert sorted(pairs[:8]) == sorted(pairs[8:]) == sorted(expected)


def test_processes_of_a_role_take_turns():
    domains = [f.victim for f in first(30, kinds=("kill",)) if f.role == "domain"]
    assert domains == [1, 2, 0, 1, 2, 0, 1, 2, 0, 1]


def test_how_long_and_how():
    for fault in first(60, kinds=("stop", "drop", "delay")):
        shortest, longest = SECONDS[fault.kind]
        assert shortest <= fault.seconds <= longest
        assert (fault.how in ("cut", "stall", "truncate")) == (fault.kind == "drop")
        assert (fault.size > 0) == (fault.kind == "delay")


def test_links_that_carry_pages_are_disturbed_and_nothing_else():
    victims = VICTIMS | {"pages": 2}
    kinds = ("kill", "drop", "delay", "corrupt")
    faults = list(itertools.islice(draw(1, kinds, victims, ("domain", "pages")), 24))
    assert sorted((fault.kind, fault.role) for fault in faults[:8]) == [
        *(("corrupt", "pages"), ("delay", "domain"), ("delay", "pages"), ("drop", "domain")),
        *(("drop", "pages"), ("kill", "domain"), ("kill", "prefill"), ("kill", "router")),
    ]
    assert all(0.1 <= fault.size <= 0.9 for fault in faults if fault.kind == "corrupt")


def test_workers_alone_have_a_planned_end():
    victims = VICTIMS | {"ffn": 2, "face": 2, "pages": 1}
    faults = list(itertools.islice(draw(1, ("end",), victims, ()), 12))
    assert {fault.role for fault in faults} == {"prefill", "domain", "ffn"}
    assert {(fault.seconds, fault.how) for fault in faults} == {(0.0, "")}


def test_nothing_to_disturb():
    assert first(3, kinds=("drop",), linked=()) == []
