import numpy as np
import pytest

from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.sequence import SchedulerSizes
from jaxserve.engine.step_policies import FIRST_INTERVAL, PROBE_STEPS, DraftPolicy
from jaxserve.observe.load import DraftCounts
from tests.jaxserve.engine.step_plans import make_request, sampled


def run(policy: DraftPolicy, steps: int, seconds: dict[int, float], held: int, rows: int = 4):
    """The choices of so many steps, each of which takes what is said for its drafts."""
    chosen = []
    for _ in range(steps):
        drafts = policy.choose(rows)
        chosen.append(drafts)
        policy.took(rows, drafts, seconds[drafts])
        some = np.full(rows, drafts) if drafts else None
        policy.completed(some, None if some is None else np.full(rows, held))
    return chosen


@pytest.mark.parametrize(("seconds", "best"), [(0.15, 3), (0.25, 0)])
def test_drafts_where_they_give_more_tokens_a_second(seconds, best):
    chosen = run(DraftPolicy(3, automatic=True), 60, {3: seconds, 0: 0.1}, held=1)
    assert chosen[:18] == [3] * 9 + [0] * 9
    assert set(chosen[18:]) == {best}


def test_a_step_after_one_of_the_other_kind_is_not_measured():
    """Passes of the last step with drafts are in its time."""
    policy = DraftPolicy(3, automatic=True)
    for _ in range(10):
        policy.took(4, 3, 0.1)
        policy.took(4, 0, 9.0)
    assert policy.choose(4) == 3
    for drafts, seconds in ((3, 0.5), (0, 0.1)):
        for _ in range(10):
            policy.took(4, drafts, seconds)
    assert policy.choose(4) == 0


def test_lanes_are_told_apart_where_drafts_are_counted():
    policy = DraftPolicy(2, automatic=True, lanes=2)
    for drafts, seconds in ((2, 0.2), (0, 0.1)):
        for _ in range(9):
            policy.took(1, drafts, seconds)
    for _ in range(40):  # drafts of a lane's first step after one without are not counted
        policy.completed(np.asarray([2]), np.asarray([0]), lane=0)
        policy.completed(None, None, lane=0)
        policy.completed(np.asarray([2]), np.asarray([2]), lane=1)
    assert policy.choose(1) == 2


def test_it_looks_again_and_changes_its_mind():
    policy = DraftPolicy(3, automatic=True)
    run(policy, 40, {3: 0.4, 0: 0.1}, held=0)
    later = run(policy, 20 * FIRST_INTERVAL, {3: 0.11, 0: 0.1}, held=3)
    first = later.index(3)
    assert first <= FIRST_INTERVAL
    assert later[-1] == 3


def test_sizes_are_told_apart():
    policy = DraftPolicy(2, automatic=True)
    run(policy, 40, {2: 0.1, 0: 0.1}, held=1, rows=1)
    run(policy, 40, {2: 0.9, 0: 0.1}, held=1, rows=32)
    assert (policy.choose(1), policy.choose(32)) == (2, 0)


def test_at_most_a_step_in_fifty_is_a_probe_and_later_fewer():
    policy, seconds = DraftPolicy(3, automatic=True), {3: 0.4, 0: 0.1}
    run(policy, 20, seconds, held=0)
    for steps in (300, 600, 3000):
        probes = run(policy, steps, seconds, held=0).count(3)
        assert probes <= min(steps / 50, 6 * PROBE_STEPS)


def test_steps_that_prefill_try_nothing():
    """They are as the nearest size that was decided; unknown, they have drafts."""
    policy = DraftPolicy(2, automatic=True)
    assert {policy.choose(3, prefills=True) for _ in range(40)} == {2}
    run(policy, 40, {2: 0.9, 0: 0.1}, held=1, rows=32)
    assert {policy.choose(rows, prefills=True) for rows in [3, 20, 500] * 400} == {0}


def test_a_small_gain_changes_nothing():
    policy = DraftPolicy(1, automatic=True)
    run(policy, 40, {1: 0.22, 0: 0.1}, held=1)
    later = run(policy, 4000, {1: 0.195, 0: 0.1}, held=1)
    assert sum(drafts == 1 for drafts in later) <= 40


def test_without_a_choice():
    assert set(run(DraftPolicy(3, automatic=False), 20, {3: 9.0, 0: 0.1}, held=0)) == {3}


def test_counts_by_place():
    counts = DraftCounts()
    counts.add(np.asarray([3, 3, 1, 0]), np.asarray([2, 0, 1, 0]))
    counts.add(np.asarray([3]), np.asarray([3]))
    assert counts == DraftCounts(runs=4, drafted=10, accepted=[3, 2, 1])
    other = DraftCounts(runs=1, drafted=1, accepted=[1])
    assert DraftCounts.sum([counts, other]) == DraftCounts(runs=5, drafted=11, accepted=[4, 2, 1])
    assert DraftCounts.sum([]) is None


def long_prompts(limit):
    """Chunks of two prompts beside decoding: prompt, tokens before it, size, milliseconds."""
    sizes = {"groups": 1, "slots": 2, "token_budget": 256, "token_buckets": [2, 32, 128, 256]}
    sizes |= {"pages": 700, "page_size": 16, "max_length": 5000, "page_buckets": [313]}
    scheduler = Scheduler(SchedulerSizes(**sizes, lanes=1, max_waiting=9, step_seconds=limit))
    scheduler.add(make_request("decodes", max_tokens=4999))
    steps = []
    for number in range(2):
        scheduler.add(make_request(f"prompt {number}", [5] * 4096, max_tokens=1))
        while scheduler.num_running + scheduler.num_waiting > 1:
            plan = scheduler.plan(0)
            size = plan.bucket.tokens
            behind = int((plan.kv_lengths - plan.token_counts)[plan.token_counts.argmax()])
            scheduler.took(plan, (milliseconds := 2 + size * (0.02 + behind * 1e-5)) / 1e3)
            scheduler.complete(plan, sampled(dict.fromkeys(range(2), 7)))
            steps += [(number, behind, size, milliseconds)] * (size > 2)
    scheduler.check_integrity()
    return steps


def test_chunks_are_as_large_as_the_time_of_a_step_allows():
    """Sizes of 256, 128 and 32 tokens take 5 ms from 0, 344 and 7,375 tokens on."""
    steps = long_prompts(limit=0.005)
    assert sum(milliseconds > 5 for *_, milliseconds in steps) <= 0.02 * len(steps)
    assert [size for number, behind, size, _ in steps if number and 31 < behind < 344] == [128] * 2
    assert {size for _, behind, size, _ in steps if behind > 700} == {32}
    assert [size for _, _, size, _ in long_prompts(limit=0.0)] == ([256] * 16 + [32]) * 2
    assert [size for _, _, size, _ in long_prompts(limit=1e-4)].count(32) >= 240
