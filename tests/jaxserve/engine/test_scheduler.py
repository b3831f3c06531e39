"""One sequence, several, and who is let in; every step written out.

Preemption has a file of its own; the simulation plays everything at once.
"""

import itertools

import numpy as np
import pytest

from jaxserve.engine.request import Request, SamplingParams
from jaxserve.errors import InvalidRequestError, OverloadedError
from jaxserve.roles.step_arrays import FROM_DEVICE
from jaxserve.roles.written_steps import SequenceRow
from tests import golden
from tests.jaxserve.engine.step_plans import (
    in_pool,
    make_request,
    make_scheduler,
    news,
    row,
    sampled,
    step,
)


def test_prefill_and_decode_one_step_ahead():
    scheduler = make_scheduler(make_request("a", [5, 6, 7], max_tokens=4))
    first = scheduler.plan(0)
    assert first == step(0, 3, 2, [row(0, [5, 6, 7], 3, [0, 1])])
    second = scheduler.plan(0)
    assert second == step(1, 1, 2, [row(0, [FROM_DEVICE], 4, [0, 1])])
    assert scheduler.plan(0) is None, "two steps are in flight"
    assert scheduler.complete(first, sampled({0: 11})) == [news("a", [11])]
    third = scheduler.plan(0)
    assert third == step(2, 1, 8, [row(0, [FROM_DEVICE], 5, [0, 1, 2])])
    assert scheduler.complete(second, sampled({0: 12})) == [news("a", [12])]
    fourth = scheduler.plan(0)
    assert fourth == step(3, 1, 8, [row(0, [FROM_DEVICE], 6, [0, 1, 2])])
    assert scheduler.complete(third, sampled({0: 13})) == [news("a", [13])]
    assert scheduler.plan(0) is None, "the fourth token is in flight"
    assert scheduler.complete(fourth, sampled({0: 14})) == [news("a", [14], "length")]
    assert in_pool(scheduler) == [0]
    assert not scheduler.has_work


def test_the_next_prefill_chunk_does_not_wait_for_the_last():
    scheduler = make_scheduler(make_request("a", [1, 2, 3, 4, 5, 6, 7]))
    first, second = scheduler.plan(0), scheduler.plan(0)
    assert first == step(0, 4, 2, [row(0, [1, 2, 3, 4], 4, [0, 1], sample=False)])
    assert second == step(1, 3, 8, [row(0, [5, 6, 7], 7, [0, 1, 2, 3])])
    assert scheduler.complete(first, sampled({})) == []
    assert scheduler.plan(0) == step(2, 1, 8, [row(0, [FROM_DEVICE], 8, [0, 1, 2, 3])])
    assert scheduler.complete(second, sampled({0: 11})) == [news("a", [11])]


def test_sampling_parameters_travel_with_the_row():
    scheduler = make_scheduler()
    params = SamplingParams(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1)
    scheduler.add(Request(request_id="a", prompt=[5], params=params, seed=77))
    (rows,) = scheduler.plan(0).groups
    assert rows == [SequenceRow(0, [5], 1, [0], True, 0.5, 3, 0.9, 0.1, 77)]


@pytest.mark.parametrize("token_id", [0, 9])
def test_end_ids_drop_the_token_in_flight_and_keep_the_slot_until_it_lands(token_id):
    scheduler = make_scheduler(slots=1)
    scheduler.add(make_request("a", [5, 6, 7], stop_token_ids=(9,)))
    scheduler.add(make_request("b", [8]))
    first, second = scheduler.plan(0), scheduler.plan(0)
    assert scheduler.complete(first, sampled({0: token_id})) == [news("a", [], "stop", token_id)]
    assert scheduler.plan(0) is None, "b waits for the slot"
    assert in_pool(scheduler) == [2]
    assert scheduler.complete(second, sampled({0: 11})) == []
    assert in_pool(scheduler) == [0]
    assert scheduler.plan(0) == step(2, 1, 2, [row(0, [8], 1, [0])])


def test_an_ended_id_may_come_again_while_its_step_is_in_flight():
    scheduler = make_scheduler(make_request("a", [5]))
    first, second = scheduler.plan(0), scheduler.plan(0)
    scheduler.complete(first, sampled({0: 0}))
    scheduler.add(make_request("a", [6]))
    third = scheduler.plan(0)
    assert third == step(2, 1, 2, [row(1, [6], 1, [1])])
    assert scheduler.complete(second, sampled({0: 12})) == []
    assert scheduler.complete(third, sampled({1: 13})) == [news("a", [13])]


def test_groups_with_fewest_pages_in_use_come_first_and_share_one_bucket():
    scheduler = make_scheduler(make_request("a", [1, 2, 3, 4, 5]), make_request("b", [6]), groups=3)
    first = scheduler.plan(0)
    assert first == step(
        0, 4, 2, [row(0, [1, 2, 3, 4], 4, [0, 1], sample=False)], [row(0, [6], 1, [0])], []
    )
    scheduler.add(make_request("c", [7]))
    scheduler.add(make_request("d", [8]))
    second = scheduler.plan(0)
    assert second == step(
        1,
        3,
        8,
        [row(0, [5], 5, [0, 1, 2])],
        [row(0, [FROM_DEVICE], 2, [0]), row(1, [8], 1, [1])],
        [row(0, [7], 1, [0])],
    )
    assert in_pool(scheduler) == [3, 2, 1]
    assert scheduler.complete(first, sampled({}, {0: 11}, {})) == [news("b", [11])]
    made = scheduler.complete(second, sampled({0: 12}, {0: 13, 1: 14}, {0: 15}))
    assert made == [news("a", [12]), news("b", [13]), news("d", [14]), news("c", [15])]


def test_lanes_with_fewest_sequences_come_first_and_share_the_pages():
    scheduler = make_scheduler(lanes=2)
    for request_id, token in (("a", 1), ("b", 2), ("c", 3)):
        scheduler.add(make_request(request_id, [token]))
    assert scheduler.plan(1) == step(0, 1, 2, [row(0, [2], 1, [1])], lane=1)
    assert scheduler.plan(0) == step(1, 3, 2, [row(0, [1], 1, [0]), row(1, [3], 1, [2])])


def test_lanes_complete_in_any_order_but_each_in_its_own():
    scheduler = make_scheduler(make_request("a", [1]), make_request("b", [2]), lanes=2)
    first, other, second = scheduler.plan(0), scheduler.plan(1), scheduler.plan(0)
    with pytest.raises(ValueError, match="lane 0: step 2 completed, expected 0"):
        scheduler.complete(second, sampled({0: 12}))
    assert scheduler.complete(other, sampled({0: 21})) == [news("b", [21])]
    assert scheduler.complete(first, sampled({0: 11})) == [news("a", [11])]
    with pytest.raises(ValueError, match="lane 1: step 1 completed, expected none"):
        scheduler.complete(other, sampled({0: 21}))


def test_a_big_request_holds_smaller_ones_back():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=2))
    scheduler.add(make_request("big", list(range(1, 13)), max_tokens=2))
    scheduler.add(make_request("small", [4]))
    first, second = scheduler.plan(0), scheduler.plan(0)
    assert scheduler.waiting_ids() == ["big", "small"]
    scheduler.complete(first, sampled({0: 11}))
    scheduler.complete(second, sampled({0: 12}))
    third = scheduler.plan(0)
    assert third.groups == [[row(0, [1, 2, 3, 4], 4, [0, 1], sample=False)]]
    assert scheduler.waiting_ids() == ["small"]
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)


def test_requests_with_options_wait_for_their_programs_and_others_overtake_them():
    scheduler, compiled = make_scheduler(), []
    scheduler.queue.takes_options = lambda: bool(compiled)
    for name in ("scored", "cancelled"):
        scheduler.add(make_request(name, [1, 2], logprobs=1, max_tokens=1))
    scheduler.add(make_request("plain", [4], max_tokens=1))
    first = scheduler.plan(0)
    assert scheduler.waiting_ids() == ["scored", "cancelled"]
    assert scheduler.complete(first, sampled({0: 11})) == [news("plain", [11], "length")]
    scheduler.cancel("cancelled")
    assert scheduler.plan(0) is None
    compiled.append("options")
    assert [one.logprobs for one in scheduler.plan(0).groups[0]] == [1]
    assert scheduler.waiting_ids() == []


def test_prompts_are_cut_to_the_steps_that_are_compiled():
    scheduler, most = make_scheduler(), [2]
    scheduler.composer.token_budget = lambda: most[0]
    scheduler.add(make_request("a", [1, 2, 3]))
    scheduler.add(make_request("b", [4, 5]))
    assert scheduler.plan(0).groups == [[row(0, [1, 2], 2, [0], sample=False)]]
    most[0] = 4
    assert scheduler.plan(0).groups == [[row(0, [3], 3, [0, 1]), row(1, [4, 5], 2, [2])]]


def test_admission_leaves_a_page_for_everybody_inside():
    scheduler = make_scheduler(pages=5, max_length=10)
    scheduler.add(make_request("a", [1, 2, 3]))  # 2 pages, for 3 tokens and the next
    scheduler.add(make_request("b", [4, 5, 6, 7]))  # 3 are left, and a may need one of them
    scheduler.plan(0)
    assert scheduler.waiting_ids() == ["b"]
    just_fits = make_scheduler(pages=2, max_length=16)
    just_fits.add(make_request("a", [1, 2, 3, 4], max_tokens=1))
    assert just_fits.plan(0) == step(0, 4, 2, [row(0, [1, 2, 3, 4], 4, [0, 1])])


def test_requests_that_can_never_run_are_refused():
    scheduler = make_scheduler(pages=4)
    for refuse in (scheduler.limits.check, scheduler.add):

        def call(prompt, max_tokens, refuse=refuse):
            refuse(make_request("a", prompt, max_tokens))

        golden.check_arguments("engine/requests.txt", InvalidRequestError, call, {})
    assert not scheduler.has_work


def test_a_full_queue_refuses():
    scheduler = make_scheduler(make_request("a", [1]), make_request("b", [1]), max_waiting=2)
    with pytest.raises(OverloadedError, match="2 requests wait already"):
        scheduler.add(make_request("c", [1]))
    scheduler.plan(0)
    scheduler.add(make_request("c", [1]))
    for taken in "ac":
        with pytest.raises(InvalidRequestError, match=f"request_id: '{taken}' is already running"):
            scheduler.add(make_request(taken, [2]))


def test_groups_are_checked_page_by_page_and_once_a_change():
    scheduler = make_scheduler(groups=3, pages=40)
    assert not list(scheduler.integrity())
    scheduler.add(make_request("a", [1, 2, 3]))
    scheduler.add(make_request("b", [4]))
    plan = scheduler.plan(0)
    checks = scheduler.integrity()
    assert sum(1 for _ in itertools.islice(checks, 60)) == 60, "40 or so for each of two groups"
    assert [group.changed for group in scheduler.groups] == [False, True, False], "it was left"
    assert 38 <= len(list(scheduler.integrity())) < 50
    assert not list(scheduler.integrity())
    scheduler.cancel("b")
    scheduler.complete(plan, sampled({0: 11}, {}, {}))
    scheduler.groups[1].promised += 1
    with pytest.raises(RuntimeError, match="group 1 counts"):
        list(scheduler.integrity())
    scheduler.groups[1].promised -= 1
    scheduler.lanes[0].in_flight[0] += 1
    with pytest.raises(RuntimeError, match="request 'a' is counted in the wrong number of steps"):
        list(scheduler.integrity())


def test_limits_that_do_not_fit_each_other():
    golden.check_arguments("engine/limits.txt", ValueError, make_scheduler, {})


def test_integrity_names_the_request_and_what_is_wrong():
    scheduler = make_scheduler(make_request("a", [1, 2, 3]))
    scheduler.plan(0)
    scheduler.check_integrity()
    (sequence,) = scheduler.groups[0].residents()
    (lane,) = scheduler.lanes
    for harm, message in (
        (lane.in_flight, "is counted in the wrong number of steps"),
        (lane.pending, "has the wrong number of tokens pending"),
        (lane.length, "has another length in its slot"),
        (lane.last_token, "has another last token in its slot"),
    ):
        harm[0] += 1
        with pytest.raises(RuntimeError, match=f"request 'a' {message}"):
            scheduler.check_integrity()
        harm[0] -= 1
    sequence.page_ids.pop()
    with pytest.raises(RuntimeError, match=r"lost pages \[1\]"):
        scheduler.check_integrity()
    sequence.page_ids.append(1)
    scheduler.check_integrity()
    scheduler.groups[0].promised += 1
    with pytest.raises(RuntimeError, match=r"group 0 counts .* pages promised"):
        scheduler.check_integrity()


@golden.table("engine/upcoming.yaml")
def test_prediction_modules_hear_what_comes_behind_a_chunk(prompt, modules, upcoming):
    limits = {"slots": 1, "drafts": 2, "modules": modules, "automatic_drafts": False}
    scheduler = make_scheduler(**limits, token_buckets=[4]).scheduler
    scheduler.add(make_request("a", prompt))
    plan = scheduler.plan(0)
    assert plan.token_ids.tolist() == [1, 2, 3, 4]
    assert np.frombuffer(plan.upcoming, "<i4").tolist() == upcoming
