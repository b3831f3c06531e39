"""Which messages run together, and when: policies in a time of their own."""

import pytest

from jaxserve.link.remote.batching import Turns, Waiting
from jaxserve.link.remote.passes import POLICIES


def message(domain, layer=0, lane=0, shape=None):
    return Waiting(domain, lane, layer, shape, lane)


def taken(policy, now=0.0, **options):
    """Domains of the next batch."""
    return "".join(one.domain for one in policy.take(now, **({"idle": True} | options)).batch)


def test_the_domain_served_longest_ago_is_next_and_newcomers_before_it():
    policy = Turns()
    for name in "abcb":
        policy.put(message(name), 0.0)
        assert taken(policy) == name
    for name in "bcaxn":
        policy.put(message(name), 0.0)
    assert [taken(policy) for _ in range(6)] == ["x", "n", "a", "c", "b", ""]


def test_a_merged_pass_has_one_layer_and_shape_and_each_domain_once():
    policy = Turns(most=3)
    for one in (
        message("a"), message("b", layer=1), message("c", shape="wide"), message("d"),
        message("a", lane=1), message("e"), message("f"),
    ):  # fmt: skip
        policy.put(one, 0.0)
    assert taken(policy, idle=False) == ""
    assert [taken(policy) for _ in range(5)] == ["ade", "b", "c", "fa", ""]


@pytest.mark.parametrize("make", POLICIES.values())
def test_messages_of_a_lost_domain_vanish_and_a_newer_one_replaces_a_lane_s(make):
    policy = make(8)
    for layer in (3, 4):
        policy.put(message("a", layer=layer), 0.0)
        policy.put(message("b", layer=layer), 0.0)
    policy.forget("a")
    decision = policy.take(10.0, idle=True)
    assert [(one.domain, one.layer) for one in decision.batch] == [("b", 4)]
    policy.put(message("c", layer=4), 10.0)
    policy.put(message("d", layer=4, shape="wide"), 10.0)
    assert taken(policy, 10.0) == "c"
    policy.forget("d")
    assert (taken(policy, 10.0), policy.places) == ("", min(2, policy.most))
