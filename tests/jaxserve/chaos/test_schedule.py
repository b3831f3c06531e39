"""Faults are a function of the seed, and every pair of a kind and a role gets its turn."""

import itertools

from jaxserve.chaos.schedule import SECONDS, draw

VICTIMS = {"router": 1, "prefill": 2, "domain": 3}


def first(count, seed=1, kinds=("kill", "stop", "drop"), linked=("prefill", "domain"), together=1):
    return list(itertools.islice(draw(seed, kinds, VICTIMS, linked, together), count))


def role(fault):
    ((only, _),) = fault.victims
    return only


def test_the_seed_decides_and_each_pair_comes_once_a_round():
    assert first(40) == first(40) != first(40, seed=2)
    pairs = [(fault.kind, role(fault)) for fault in first(16)]
    expected = [(kind, each) for kind in ("kill", "stop") for each in VICTIMS]
    expected += [("drop", "prefill"), ("drop", "domain")]
    assert sorted(pairs[:8]) == sorted(pairs[8:]) == sorted(expected)


def test_processes_of_a_role_take_turns():
    victims = [victim for fault in first(30, kinds=("kill",)) for victim in fault.victims]
    domains = [index for each, index in victims if each == "domain"]
    assert domains == [1, 2, 0, 1, 2, 0, 1, 2, 0, 1]


def test_processes_that_die_together_are_different_ones():
    faults = first(15, kinds=("kill",), together=2)
    assert faults == first(15, kinds=("kill",), together=2)
    pairs = [("router", "prefill"), ("router", "domain"), ("prefill", "prefill")]
    pairs += [("prefill", "domain"), ("domain", "domain")]
    for begin in (0, 5, 10):
        found = [tuple(each for each, _ in fault.victims) for fault in faults[begin : begin + 5]]
        assert sorted(found) == sorted(pairs), "each pair of roles once a round, no second router"
    assert all(len({*fault.victims}) == 2 for fault in faults)
    assert first(3, together=7) == [], "six processes"


def test_how_long_and_how():
    for fault in first(60, kinds=("stop", "drop", "delay")):
        shortest, longest = SECONDS[fault.kind]
        assert shortest <= fault.seconds <= longest
        assert (fault.how in ("cut", "stall", "truncate")) == (fault.kind == "drop")
        assert (fault.size > 0) == (fault.kind == "delay")


def test_links_that_carry_pages_are_disturbed_and_nothing_else():
    victims = VICTIMS | {"pages": 2}
    kinds = ("kill", "drop", "delay", "corrupt")
    faults = list(itertools.islice(draw(1, kinds, victims, ("domain", "pages")), 27))
    assert sorted((fault.kind, role(fault)) for fault in faults[:9]) == [
        *(("corrupt", "domain"), ("corrupt", "pages"), ("delay", "domain"), ("delay", "pages")),
        *(("drop", "domain"), ("drop", "pages")),
        *(("kill", "domain"), ("kill", "prefill"), ("kill", "router")),
    ]
    assert all(0.1 <= fault.size <= 0.9 for fault in faults if fault.kind == "corrupt")
    assert first(3, kinds=("drop",), linked=()) == []


def test_workers_alone_have_a_planned_end():
    victims = VICTIMS | {"ffn": 2, "face": 2, "pages": 1}
    faults = list(itertools.islice(draw(1, ("end",), victims, ()), 12))
    assert {role(fault) for fault in faults} == {"prefill", "domain", "ffn"}
    assert {(fault.seconds, fault.how) for fault in faults} == {(0.0, "")}
