"""Cohorts wait for their lanes, and for none of them too long, in a time of their own."""

import heapq
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.link.remote.batching import Waiting
from jaxserve.link.remote.cohorts import FIRST_ITERATION, Cohorts, _Lane
from jaxserve.link.remote.passes import POLICIES
from tests.jaxserve.link.remote.test_batching import message, put, taken


def in_step(policy, domains="abcd", layers=12, beat=0.001):
    """Puts the domains through layers together, each back after a beat; returns the time."""
    now = 0.0
    put(policy, domains, 0, now)
    for layer in range(layers):
        decision = policy.take(now, idle=True)
        policy.served(decision.batch, now)
        now += beat
        put(policy, [one.domain for one in decision.batch], layer + 1, now)
    assert len(decision.batch) == len(domains)
    return now


@pytest.mark.parametrize("together", [0.0, 0.009])
def test_a_cohort_waits_for_its_last_member_and_not_for_longer_than_that_is_worth(together):
    policy = Cohorts(most=8, price=1.0)
    now = in_step(policy)
    policy.served(policy.take(now, idle=True).batch, now)
    put(policy, "abc", 13, now + 0.001 + together)
    # Three wait for one: they go on once they had to wait another third of an iteration.
    now += 0.001 + together
    while not (decision := policy.take(now, idle=True)).batch:
        assert decision.at > now
        now = decision.at
    assert [one.domain for one in decision.batch] == ["a", "b", "c"]
    assert 0.9 * FIRST_ITERATION / 3 < now - together - 0.013 < 1.1 * FIRST_ITERATION / 3


@pytest.mark.parametrize(("late", "left_behind"), [("dddddd", 1), ("dcbadcba", 0)])
def test_a_lane_that_is_late_at_every_layer_is_left_behind_before_long(late, left_behind):
    """Each time three messages wait 2 ms, together 6 of the 25 ms that leaving it behind costs."""
    policy = Cohorts(most=8)
    now = in_step(policy)
    for layer, last in enumerate(late, 13):
        policy.served(policy.take(now, idle=True).batch, now)
        put(policy, "abcd".replace(last, ""), layer, now + 0.001)
        policy.take(now := now + 0.003, idle=True)
        policy.put(message(last, layer), now)
    assert policy.left_behind == left_behind


def test_lateness_at_the_first_layer_is_usual_after_a_step_alone():
    lane = _Lane([])
    for number in range(800):
        lane.leaves(number % 16, number)
        lane.arrives((number + 1) % 16, number + 1 + (number % 32 == 31) / 4)
    usual = [lane.leaves(layer, 800.0) or lane.usual for layer in (15, 5)]
    assert usual[0] > 5 * usual[1]


def test_nobody_waits_for_a_lane_whose_domain_waits_for_another_answer():
    """Domain b takes lane 1's answer first. Nor does b, left behind, take the cohort from a."""
    policy, now = Cohorts(most=8), 0.0
    steps = {"a01 b01": "ab", "a00 b00": "ab", "b11": "", "a10 b10": "ab", "a20": "a"}
    steps |= {"a11": "ba", "a30 b20": "a", "a21": "", "a40": "a", "": "", "b21": "ab"}
    for texts, served in steps.items():
        for name, layer, lane in texts.split():
            policy.put(message(name, int(layer), int(lane)), now)
        if batch := policy.take(now, idle=True).batch:
            policy.served(batch, now)
        assert "".join(one.domain for one in batch) == served
        now += 0.001


@pytest.mark.parametrize(
    "case", ["l 7 0.9 11 l", "l 13 1.1 11", "l 5 0.9 11", "n 0 0.9 12", "l 13 0.9 10"]
)
def test_a_lane_left_behind_catches_up_where_the_pool_would_idle(case):
    """For 1 ms. Half an iteration behind it waits instead, as newcomers and lanes of few do."""
    name, layer, took, count, *ran = case.split()
    policy, others = Cohorts(most=16), [*"abcdefghijkl"[: int(count)]]
    now = in_step(policy, domains="abcdefghijkl")
    policy.served(policy.take(now, idle=True).batch, now)
    put(policy, others, 13, now + 0.001)
    policy.served(policy.take(now := now + 1.0, idle=True).batch, now)
    policy._layers, policy._parts._passes = 30 if name == "n" else 15, {12: (float(took) / 1e3, 1)}
    put(policy, "a", 14, now)
    policy._lanes.get((name, 0), _Lane([])).layer = int(layer) - 1
    assert (taken(policy, now), put(policy, name, int(layer), now)) == ("", [True])
    assert (taken(policy, now), policy.left_behind) == ("".join(ran), 12 - len(others))
    put(policy, others[1:] + ran, 14, now + 0.001)
    assert (taken(policy, now + 0.001), policy._parts.layers) == ("".join(others + ran), 1)


def test_a_straggler_rejoins_where_its_cohort_comes_by_and_a_newcomer_at_layer_0():
    policy = Cohorts(most=8)
    now = in_step(policy, layers=4)
    policy.forget("d")
    policy.put(message("n"), now)
    assert taken(policy, now) == "abc"
    put(policy, "abc", 0, now)
    assert taken(policy, now) == "nabc"
    put(policy, "nab", 1, now)
    assert taken(policy, now) == ""
    policy.forget("c")
    assert taken(policy, now) == "nab"
    # Overdue, a lane behind does not take the cohort from those on their way; one in step does.
    for name, layer, left_behind in (("d", 9, 0), ("a", 2, 2)):
        policy.put(message(name, layer), now)
        now += 1.3 * policy.iteration
        assert (taken(policy, now), policy.left_behind) == (name, left_behind)


def test_lanes_that_a_lost_pool_leaves_go_on_together_or_where_the_pool_would_idle():
    policy = Cohorts(most=8)
    for name in "ab":  # b finds the pool busy with a; they are due at 1.004
        put(policy, name, 3, 1.0)
        policy.served(policy.take(1.0, idle=name == "a").batch, 1.0)
    put(policy, "a", 4, 1.001)
    assert (taken(policy, 1.001), put(policy, "b", 4, 1.002)) == ("", [True])
    policy.served(policy.take(1.002, idle=True).batch, 1.002)
    for layer, seconds, served in ((2, 9.0, ""), (5, 1e-4, ""), (2, 1e-4, "m"), (3, 1e-4, "m")):
        policy._parts._passes = {1: (seconds, 1)}
        put(policy, "m", layer, 1.002)
        assert taken(policy, 1.002) == served
    assert [put(policy, "abm", 5, 1.003), taken(policy, 1.003), policy._moved][1:] == ["abm", set()]


def test_a_lane_waits_1_3_iterations_where_its_cohort_never_comes_by():
    policy = Cohorts(most=8)
    arrived = now = in_step(policy, domains="abc", layers=4)
    policy.put(message("d", 9), now)
    batch = policy.take(now, idle=True).batch
    while all(one.domain != "d" for one in batch):
        assert now - arrived < 1.3 * policy.iteration
        policy.served(batch, now)
        now += 0.001
        put(policy, [one.domain for one in batch], (batch[0].layer + 1) % 5, now)
        batch = policy.take(now, idle=True).batch


def test_lanes_whose_step_ends_earlier_wait_for_those_with_drafts_and_nobody_for_idle_ones():
    policy = Cohorts(most=8)
    now = in_step(policy, layers=4)
    assert taken(policy, now) == "abcd"
    for name, layer in zip("abcd", (0, 0, 5, 5), strict=True):
        policy.put(message(name, layer), now)
    assert taken(policy, now) == "cd"
    put(policy, "cd", 0, now)
    assert taken(policy, now) == "abcd"
    # By the price alone, four would be worth a wait of two iterations.
    policy.put(message("n"), now := now + 1.4 * policy.iteration)
    assert (taken(policy, now), policy.left_behind) == ("n", 2)


def test_parts_stay_in_step_and_the_one_behind_goes_on_when_they_become_one():
    policy = Cohorts(most=8)
    now = in_step(policy, domains="abcde", layers=4)
    for count, ran in ((2, ["ace", "bd", "ace"]), (1, ["bd", "abcde"])):
        policy._parts.count = count
        policy._divide()
        for batch in ran:
            decision = policy.take(now, idle=True)
            policy.served(decision.batch, now)
            assert sorted(one.domain for one in decision.batch) == [*batch]
            put(policy, batch, decision.batch[0].layer + 1, now)


KINDS = st.sampled_from(["slow", "lost", "idle", "shape", "parts"])
EVENTS = st.lists(st.tuples(KINDS, st.integers(0, 3), st.integers(0, 150)), max_size=12)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(list(POLICIES.values())), st.integers(1, 4), st.integers(1, 3), EVENTS)
def test_every_message_is_served_in_time_whatever_happens(make, domains, lanes, events):
    """Lanes of 5 layers, some slow, lost, idle, of another shape or in parts from a moment on."""
    policy, layers, now, end = make(8), 5, 0.0, 0.0
    arrivals, running, order, waiting = [], [], itertools.count(), {}
    happens = {at * 1e-3: (kind, domain) for kind, domain, at in events}
    slow, idle, lost, shape = {}, set(), set(), {}

    def send(domain, lane, layer, at):
        heapq.heappush(arrivals, (at, next(order), domain, lane, layer))

    for number in range(domains * lanes):
        send(number % domains, number // domains, 0, 0.0)
    for _ in range(4000):
        if not running:
            running, at = policy.take(now, idle=True)
            assert running or at > now
            end = now + 4e-4 + 1e-4 * len(running) if running else at
            assert len({(one.layer, one.shape) for one in running}) <= 1
            assert len({one.domain for one in running}) == len(running) <= policy.most
            for one in running:
                assert one.domain not in lost
                assert waiting.pop(one.key) is one  # once
                limit = 1.3 * max(getattr(policy, "iteration", 1.0), FIRST_ITERATION)
                assert now - one.arrived <= limit + 8e-4  # a pass
        now = max(now, min(end, arrivals[0][0] if arrivals else end))
        if now > 0.4:
            break
        for at in [at for at in happens if at <= now]:
            kind, domain = happens.pop(at)
            slow[domain] = 20e-3 if kind == "slow" else slow.get(domain, 0.0)
            shape[domain] = kind == "shape"
            if kind == "parts" and isinstance(policy, Cohorts):
                policy._parts.count = domain + 1
                policy._divide()
            {"idle": idle, "lost": lost}.get(kind, set()).add(domain)
            if kind == "lost":
                policy.forget(domain)
                running = [one for one in running if one.domain != domain]
        if running and end <= now:
            policy.served(running, now)
            for one in running:
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
    assert next(order) > 15 + domains * lanes or not set(range(domains)) - lost - idle
