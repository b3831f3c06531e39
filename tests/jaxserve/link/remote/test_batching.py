"""Which messages run together, and when: policies in a time of their own."""

import pytest

from jaxserve.link.remote.batching import Turns, Waiting
from jaxserve.link.remote.passes import POLICIES


def message(domain, layer=0, lane=0, shape=None):
    return Waiting(domain, lane, layer, shape, lane)


def put(policy, names, layer=0, now=0.0):
    return [policy.put(message(name, layer), now) for name in names]


def taken(policy, now=0.0, **options):
    """Domains of the next batch."""
    return "".join(one.domain for one in policy.take(now, **({"idle": True} | options)).batch)


def test_the_domain_served_longest_ago_is_next_and_newcomers_before_it():
    policy = Turns()
    for name in "abcb":
        policy.put(message(name), 0.0)
        assert taken(policy) == name
    put(policy, "bcaxn")
    assert [taken(policy) for _ in range(6)] == ["x", "n", "a", "c", "b", ""]


def test_a_merged_pass_has_one_layer_and_shape_and_each_domain_once():
    policy = Turns(most=3)
    changes = {}, {"layer": 1}, {"shape": "wide"}, {}, {"lane": 1}, {}, {}
    for name, change in zip("abcdaef", changes, strict=True):
        policy.put(message(name, **change), 0.0)
    assert taken(policy, idle=False) == ""
    assert [taken(policy) for _ in range(5)] == ["ade", "b", "c", "fa", ""]


@pytest.mark.parametrize("make", POLICIES.values())
def test_messages_of_a_lost_domain_vanish_and_a_newer_one_replaces_a_lane_s(make):
    policy = make(8)
    put(policy, "ab", 3)
    put(policy, "ab", 4)
    policy.forget("a")
    decision = policy.take(10.0, idle=True)
    assert [(one.domain, one.layer) for one in decision.batch] == [("b", 4)]
    policy.put(message("c", layer=4), 10.0)
    policy.put(message("d", layer=4, shape="wide"), 10.0)
    assert taken(policy, 10.0) == "c"
    policy.forget("d")
    assert (taken(policy, 10.0), policy.places) == ("", min(2, policy.most))
