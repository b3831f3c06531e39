"""Which messages run together, and when: policies in a time of their own."""

import heapq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.link.remote.batching import (
    POLICIES,
    Turns,
    Waiting,
    batches,
)


def message(domain, layer=0, lane=0, shape=None):
    return Waiting(domain, lane, layer, shape, lane)


def taken(policy, now=0.0, **options):
    """Domains of the next batch."""
    return "".join(one.domain for one in policy.take(now, **({"idle": True} | options)).batch)


def test_a_busy_domain_lets_the_others_in_after_each_message():
    policy, left, ran = Turns(), {"a": 6, "b": 2, "c": 1}, ""
    for name in left:
        policy.put(message(name), 0.0)
    while name := taken(policy, idle=False):
        ran += name
        left[name] -= 1
        if left[name]:
            policy.put(message(name), 0.0)
    assert ran == "abcabaaaa"


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


def test_batches_are_cut_at_the_most():
    made = batches([message(name) for name in "abcde"], 2)
    assert ["".join(one.domain for one in batch) for batch in made] == ["ab", "cd", "e"]


@pytest.mark.parametrize("name", POLICIES)
def test_messages_of_a_lost_domain_vanish_and_a_newer_one_replaces_a_lane_s(name):
    policy = POLICIES[name]()
    for layer in (3, 4):
        policy.put(message("a", layer=layer), 0.0)
        policy.put(message("b", layer=layer), 0.0)
    policy.forget("a")
    decision = policy.take(10.0, idle=True)
    assert [(one.domain, one.layer) for one in decision.batch] == [("b", 4)]
    assert not policy.take(10.0, idle=True).batch


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["slow", "lost", "idle", "shape"]),
        st.integers(0, 3),
        st.integers(0, 150),
    ),
    max_size=12,
)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(sorted(POLICIES)), st.integers(1, 4), st.integers(1, 3), EVENTS)
def test_every_message_is_served_in_time_whatever_happens(name, domains, lanes, events):
    """Lanes of 5 layers, some slow, lost, idle or of another shape from a moment on."""
    policy, layers, now, end = POLICIES[name](), 5, 0.0, 0.0
    arrivals, running, order, waiting = [], [], 0, {}
    lost, served = set(), 0
    happens = {at * 1e-3: (kind, domain) for kind, domain, at in events}
    slow, idle, shape = {}, set(), {}

    def send(domain, lane, layer, at):
        nonlocal order
        order += 1
        heapq.heappush(arrivals, (at, order, domain, lane, layer))

    for domain in range(domains):
        for lane in range(lanes):
            send(domain, lane, 0, 0.0)
    for _ in range(500):
        decision = None
        if not running:
            decision = policy.take(now, idle=True)
            running = list(decision.batch)
        if running and decision is not None:
            end = now + 4e-4 + 1e-4 * len(running)
            assert len({(one.layer, one.shape) for one in running}) == 1
            assert len({one.domain for one in running}) == len(running) <= policy.most
            for one in running:
                assert one.domain not in lost
                assert waiting.pop(one.key) is one  # once
                assert now - one.arrived <= 0.05
        times = [arrivals[0][0]] if arrivals else []
        times.append(end if running else decision.at)
        now = max(now, min(times))
        if now > 0.4:
            break
        for at in [at for at in happens if at <= now]:
            kind, domain = happens.pop(at)
            slow[domain] = 20e-3 if kind == "slow" else slow.get(domain, 0.0)
            shape[domain] = kind == "shape"
            if kind == "idle":
                idle.add(domain)
            if kind == "lost":
                lost.add(domain)
                policy.forget(domain)
                waiting = {key: one for key, one in waiting.items() if one.domain != domain}
                running = [one for one in running if one.domain != domain]
        if running and end <= now:
            policy.served(running, now)
            for one in running:
                served += 1
                layer = (one.layer + 1) % layers
                if layer or one.domain not in idle:
                    send(one.domain, one.lane, layer, now + 1e-3 + slow.get(one.domain, 0.0))
            running = []
        while arrivals and arrivals[0][0] <= now:
            _, _, domain, lane, layer = heapq.heappop(arrivals)
            if domain not in lost:
                one = Waiting(domain, lane, layer, shape.get(domain), lane)
                waiting[one.key] = one
                policy.put(one, now)
    alive = set(range(domains)) - lost - idle
    assert served > 50 or not alive
