"""Small scenarios with every step written out; the simulation beside this file plays the rest."""

import pytest

from jaxserve.engine.request import Request, SamplingParams, TokenOutput
from jaxserve.engine.scheduler import Scheduler
from jaxserve.errors import InvalidRequestError, OverloadedError
from jaxserve.pipeline.plan import FROM_DEVICE, Bucket, SequenceRow, StepPlan

GROUP_SLOTS = 3
UNSAMPLED = 999  # what the device returns where a plan samples nothing


def make_scheduler(**limits) -> Scheduler:
    defaults = {
        "groups": 1,
        "lanes": 1,
        "slots": GROUP_SLOTS,
        "pages": 8,
        "page_size": 2,
        "max_length": 16,
        "token_budget": 4,
        "token_buckets": [1, 3, 4],
        "page_buckets": [2, 8],
        "max_waiting": 4,
    }
    return Scheduler(**(defaults | limits))


def make_request(request_id: str, prompt: list[int], max_tokens: int = 8, **fields) -> Request:
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0,
        **{name: fields.pop(name) for name in list(fields) if name != "seed"},
    )
    return Request(
        request_id=request_id, prompt=prompt, params=params, eos_token_ids=frozenset({0}), **fields
    )


def row(slot, token_ids, kv_length, page_ids, sample=True) -> SequenceRow:
    """A greedy row."""
    return SequenceRow(slot, token_ids, kv_length, page_ids, sample)


def step(number, tokens, pages, *groups, lane=0) -> StepPlan:
    return StepPlan(lane, number, Bucket(tokens, pages), list(groups))


def sampled(*groups: dict[int, int]) -> list[list[int]]:
    """What the device returns, from `{slot: token}` a group."""
    return [[tokens.get(slot, UNSAMPLED) for slot in range(GROUP_SLOTS)] for tokens in groups]


def news(request_id, token_ids=(), finish_reason=None, stop_token_id=None) -> TokenOutput:
    return TokenOutput(
        request_id=request_id,
        token_ids=list(token_ids),
        finish_reason=finish_reason,
        stop_token_id=stop_token_id,
    )


def in_pool(scheduler: Scheduler, pages: int = 8) -> list[int]:
    """Pages in use, by group."""
    return [round(usage * pages) for usage in scheduler.kv_usage]


# One sequence, from prompt to end.


def test_prefill_and_decode_one_step_ahead():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [5, 6, 7], max_tokens=4))
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


def test_a_token_the_host_knows_is_sent_as_it_is():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [5]))
    scheduler.complete(scheduler.plan(0), sampled({0: 11}))
    assert scheduler.plan(0) == step(1, 1, 2, [row(0, [11], 2, [0])])


def test_the_next_prefill_chunk_does_not_wait_for_the_last():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2, 3, 4, 5, 6, 7]))
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


def test_max_length_ends_a_sequence():
    scheduler = make_scheduler(max_length=5)
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=100))
    first, second = scheduler.plan(0), scheduler.plan(0)
    assert scheduler.complete(first, sampled({0: 11})) == [news("a", [11])]
    assert scheduler.plan(0) is None
    assert scheduler.complete(second, sampled({0: 12})) == [news("a", [12], "length")]


# The end comes as a surprise.


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
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [5]))
    first, second = scheduler.plan(0), scheduler.plan(0)
    scheduler.complete(first, sampled({0: 0}))
    scheduler.add(make_request("a", [6]))
    third = scheduler.plan(0)
    assert third == step(2, 1, 2, [row(1, [6], 1, [1])])
    assert scheduler.complete(second, sampled({0: 12})) == []
    assert scheduler.complete(third, sampled({1: 13})) == [news("a", [13])]


def test_an_end_id_as_the_last_token_allowed_is_a_stop():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [5], max_tokens=1))
    assert scheduler.complete(scheduler.plan(0), sampled({0: 0})) == [news("a", [], "stop", 0)]


@pytest.mark.parametrize(
    ("fields", "outputs"),
    [
        ({}, [news("a", [], "stop", 0)]),
        ({"ignore_eos": True}, [news("a", [0]), news("a", [0]), news("a", [0], "length")]),
        ({"min_tokens": 2}, [news("a", [0]), news("a", [0]), news("a", [], "stop", 0)]),
    ],
)
def test_end_ids_that_do_not_count_are_tokens(fields, outputs):
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [5], max_tokens=3, **fields))
    received = []
    while scheduler.has_work:
        received += scheduler.complete(scheduler.plan(0), sampled({0: 0}))
    assert received == outputs


# Several sequences share a step.


def test_decoding_goes_first_and_prefill_takes_what_the_budget_leaves():
    scheduler = make_scheduler(pages=16)
    scheduler.add(make_request("a", [1]))
    scheduler.plan(0)
    scheduler.add(make_request("b", [2, 3, 4, 5, 6]))
    scheduler.add(make_request("c", [7, 8]))
    assert scheduler.plan(0) == step(
        1, 4, 2, [row(0, [FROM_DEVICE], 2, [0]), row(1, [2, 3, 4], 3, [1, 2], sample=False)]
    )


def test_prefill_budget_goes_to_the_oldest_first():
    scheduler = make_scheduler(pages=16)
    scheduler.add(make_request("a", [1, 2, 3]))
    scheduler.add(make_request("b", [4, 5]))
    first, second = scheduler.plan(0), scheduler.plan(0)
    assert first == step(0, 4, 2, [row(0, [1, 2, 3], 3, [0, 1]), row(1, [4], 1, [2], sample=False)])
    assert second == step(1, 3, 2, [row(0, [FROM_DEVICE], 4, [0, 1]), row(1, [5], 2, [2])])
    assert scheduler.complete(first, sampled({0: 11})) == [news("a", [11])]
    assert scheduler.complete(second, sampled({0: 12, 1: 13})) == [
        news("a", [12]),
        news("b", [13]),
    ]


def test_groups_with_fewest_pages_in_use_come_first_and_share_one_bucket():
    scheduler = make_scheduler(groups=3)
    scheduler.add(make_request("a", [1, 2, 3, 4, 5]))
    scheduler.add(make_request("b", [6]))
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
    assert scheduler.complete(second, sampled({0: 12}, {0: 13, 1: 14}, {0: 15})) == [
        news("a", [12]),
        news("b", [13]),
        news("c", [15]),
        news("d", [14]),
    ]


def test_lanes_with_fewest_sequences_come_first_and_share_the_pages():
    scheduler = make_scheduler(lanes=2)
    for request_id, token in (("a", 1), ("b", 2), ("c", 3)):
        scheduler.add(make_request(request_id, [token]))
    assert scheduler.plan(1) == step(0, 1, 2, [row(0, [2], 1, [1])], lane=1)
    assert scheduler.plan(0) == step(1, 3, 2, [row(0, [1], 1, [0]), row(1, [3], 1, [2])])


def test_lanes_complete_in_any_order_but_each_in_its_own():
    scheduler = make_scheduler(lanes=2)
    scheduler.add(make_request("a", [1]))
    scheduler.add(make_request("b", [2]))
    first, other, second = scheduler.plan(0), scheduler.plan(1), scheduler.plan(0)
    with pytest.raises(ValueError, match="lane 0: step 2 landed, expected 0"):
        scheduler.complete(second, sampled({0: 12}))
    assert scheduler.complete(other, sampled({0: 21})) == [news("b", [21])]
    assert scheduler.complete(first, sampled({0: 11})) == [news("a", [11])]
    with pytest.raises(ValueError, match="lane 1: step 1 landed, expected none"):
        scheduler.complete(other, sampled({0: 21}))


# Admission.


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


def test_admission_leaves_a_page_for_everybody_inside():
    scheduler = make_scheduler(pages=5, max_length=10)
    scheduler.add(make_request("a", [1, 2, 3]))  # 2 pages, for 3 tokens and the next
    scheduler.add(make_request("b", [4, 5, 6, 7]))  # 3 are left, and a may need one of them
    scheduler.plan(0)
    assert scheduler.waiting_ids() == ["b"]
    assert in_pool(scheduler, pages=5) == [2]


def test_a_request_that_just_fits_an_empty_pool_is_admitted():
    scheduler = make_scheduler(pages=2, max_length=16)
    scheduler.add(make_request("a", [1, 2, 3, 4], max_tokens=1))
    assert scheduler.plan(0) == step(0, 4, 2, [row(0, [1, 2, 3, 4], 4, [0, 1])])


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 1, "prompt: is empty"),
        ([3, -1], 1, "prompt: -1 is no token id"),
        (
            [1] * 16,
            1,
            "prompt: 16 tokens leave no room for an output: prompt and output together have at "
            "most 16 tokens",
        ),
        (
            [1] * 4,
            6,
            "max_tokens: 4 prompt tokens and up to 6 generated ones take 5 pages of 2 tokens, "
            "and a DP group has 4",
        ),
    ],
)
def test_requests_that_can_never_run_are_refused(prompt, max_tokens, message):
    scheduler = make_scheduler(pages=4)
    with pytest.raises(InvalidRequestError) as caught:
        scheduler.add(make_request("a", prompt, max_tokens))
    assert str(caught.value) == message
    assert not scheduler.has_work


def test_running_ids_cannot_be_used_twice():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1]))
    with pytest.raises(InvalidRequestError, match="request_id: 'a' is already running"):
        scheduler.add(make_request("a", [2]))


def test_a_full_queue_refuses():
    scheduler = make_scheduler(max_waiting=2)
    scheduler.add(make_request("a", [1]))
    scheduler.add(make_request("b", [1]))
    with pytest.raises(OverloadedError, match="2 requests wait already"):
        scheduler.add(make_request("c", [1]))
    scheduler.plan(0)
    scheduler.add(make_request("c", [1]))


# Pages run out.


def test_the_youngest_makes_room_and_recomputes_without_repeating_itself():
    scheduler = make_scheduler(pages=5, max_length=10, max_waiting=2)
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=7))
    scheduler.add(make_request("b", [4], max_tokens=7))
    first = scheduler.plan(0)
    assert first == step(0, 4, 2, [row(0, [1, 2, 3], 3, [0, 1]), row(1, [4], 1, [2])])
    scheduler.complete(first, sampled({0: 11, 1: 21}))
    for number, kept in ((1, [0, 1]), (2, [0, 1, 3])):
        plan = scheduler.plan(0)
        assert plan.number == number
        assert plan.groups[0][0].page_ids == kept
        scheduler.complete(plan, sampled({0: 11 + number, 1: 21 + number}))
    # a holds 5 tokens on [0, 1, 3], b holds 3 on [2, 4]: both fill their last page next.
    assert in_pool(scheduler, pages=5) == [5]
    third = scheduler.plan(0)
    assert third == step(3, 3, 8, [row(0, [13], 6, [0, 1, 3]), row(1, [23], 4, [2, 4])])
    # Now both need a page while the step is in flight. b goes once it has landed, with its token.
    assert scheduler.plan(0) is None
    assert scheduler.num_preemptions == 1
    assert scheduler.waiting_ids() == ["b"]
    assert scheduler.complete(third, sampled({0: 14, 1: 24})) == [
        news("a", [14]),
        news("b", [24]),
    ]
    assert in_pool(scheduler, pages=5) == [3]
    fourth = scheduler.plan(0)
    assert fourth == step(4, 1, 8, [row(0, [14], 7, [0, 1, 3, 2])])
    fifth = scheduler.plan(0)
    scheduler.complete(fourth, sampled({0: 15}))
    sixth = scheduler.plan(0)
    scheduler.complete(fifth, sampled({0: 16}))
    assert scheduler.complete(sixth, sampled({0: 17})) == [news("a", [17], "length")]
    # b comes back with prompt and output, five tokens in two chunks, and goes on.
    seventh, eighth = scheduler.plan(0), scheduler.plan(0)
    assert seventh == step(7, 4, 2, [row(0, [4, 21, 22, 23], 4, [0, 1], sample=False)])
    assert eighth == step(8, 1, 8, [row(0, [24], 5, [0, 1, 3])])
    assert scheduler.complete(seventh, sampled({})) == []
    assert scheduler.complete(eighth, sampled({0: 25})) == [news("b", [25])]


def three_lanes_short_of_a_page() -> tuple[Scheduler, StepPlan]:
    """a, b and c on a lane each, c's first step in flight, a and b about to need a third page."""
    scheduler = make_scheduler(lanes=3, pages=5, max_length=10)
    for request_id, token in (("a", 1), ("b", 2), ("c", 3)):
        scheduler.add(make_request(request_id, [token]))
    landing = scheduler.plan(2)
    for length in range(1, 5):
        for lane in (0, 1):
            plan = scheduler.plan(lane)
            scheduler.complete(plan, sampled({0: 10 * (lane + 1) + length}))
    assert in_pool(scheduler, pages=5) == [5]
    return scheduler, landing


def test_a_victim_with_nothing_in_flight_makes_room_at_once():
    scheduler, landing = three_lanes_short_of_a_page()
    scheduler.complete(landing, sampled({0: 31}))
    assert scheduler.plan(0) == step(9, 1, 8, [row(0, [14], 5, [0, 3, 2])])
    assert scheduler.waiting_ids() == ["c"]


def test_the_youngest_leaves_when_it_needs_a_page_itself():
    scheduler, landing = three_lanes_short_of_a_page()
    scheduler.complete(landing, sampled({0: 31}))
    scheduler.complete(scheduler.plan(2), sampled({0: 32}))
    assert scheduler.plan(2) is None
    assert scheduler.waiting_ids() == ["c"]
    assert in_pool(scheduler, pages=5) == [4]
    assert scheduler.plan(2) is None, "two pages, and two to spare, are more than one"


def test_a_page_that_comes_back_goes_to_the_oldest_who_missed_a_step():
    scheduler, landing = three_lanes_short_of_a_page()
    assert scheduler.plan(0) is None, "a waits for the page of c, which is in flight"
    assert scheduler.plan(0) is None
    assert scheduler.plan(1) is None, "b waits too, without sending anybody else away"
    assert scheduler.waiting_ids() == ["c"]
    assert scheduler.complete(landing, sampled({0: 31})) == [news("c", [31])]
    assert in_pool(scheduler, pages=5) == [4]
    assert scheduler.plan(1) is None, "the free page is for a; b is the youngest now and leaves"
    assert scheduler.waiting_ids() == ["b", "c"]
    assert scheduler.plan(0) == step(9, 1, 8, [row(0, [14], 5, [0, 3, 1])])
    scheduler.check_integrity()


def test_the_preempted_of_all_groups_queue_by_age():
    scheduler = make_scheduler(groups=2, pages=4, max_length=8)
    for request_id, token in (("a", 1), ("b", 2), ("c", 3), ("d", 4)):
        scheduler.add(make_request(request_id, [token]))
    for _ in range(4):
        scheduler.complete(scheduler.plan(0), sampled({0: 5, 1: 5}, {0: 5, 1: 5}))
    scheduler.add(make_request("e", [6]))
    assert scheduler.plan(0) == step(
        4, 1, 8, [row(0, [5], 5, [0, 2, 1])], [row(0, [5], 5, [0, 2, 1])]
    )
    assert scheduler.waiting_ids() == ["c", "d", "e"]


def test_the_preempted_move_to_a_group_with_room():
    scheduler = make_scheduler(groups=2, pages=4, max_length=8)
    scheduler.add(make_request("a", [1]))
    scheduler.add(make_request("x", [3] * 5, max_tokens=1))
    scheduler.add(make_request("b", [2]))
    for length in range(1, 5):
        scheduler.complete(scheduler.plan(0), sampled({0: 10 + length, 1: 20 + length}, {0: 30}))
    assert in_pool(scheduler, pages=4) == [4, 0]
    assert scheduler.plan(0) == step(
        4, 4, 8, [row(0, [14], 5, [0, 2, 1])], [row(0, [2, 21, 22, 23], 4, [0, 1], sample=False)]
    )


# Cancellation.


def test_cancel_a_waiting_request():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1]))
    scheduler.add(make_request("b", [2]))
    assert scheduler.cancel("a") == [news("a", [], "cancelled")]
    assert scheduler.cancel("a") == []
    assert scheduler.cancel("nobody") == []
    assert scheduler.plan(0).groups == [[row(0, [2], 1, [0])]]


def test_cancel_between_steps_frees_at_once():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1]))
    scheduler.complete(scheduler.plan(0), sampled({0: 11}))
    assert in_pool(scheduler) == [1]
    assert scheduler.cancel("a") == [news("a", [], "cancelled")]
    assert in_pool(scheduler) == [0]
    assert not scheduler.has_work


def test_cancel_in_flight_frees_when_both_steps_have_landed():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1]))
    first, second = scheduler.plan(0), scheduler.plan(0)
    assert scheduler.cancel("a") == [news("a", [], "cancelled")]
    assert scheduler.complete(first, sampled({0: 11})) == []
    assert in_pool(scheduler) == [1]
    assert scheduler.has_work
    assert scheduler.complete(second, sampled({0: 12})) == []
    assert in_pool(scheduler) == [0]
    assert not scheduler.has_work


def test_cancel_in_the_middle_of_a_prompt():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2, 3, 4, 5, 6]))
    first = scheduler.plan(0)
    scheduler.cancel("a")
    assert scheduler.plan(0) is None
    assert scheduler.complete(first, sampled({})) == []
    assert in_pool(scheduler) == [0]


def test_cancel_the_preempted_before_they_land():
    scheduler, landing = three_lanes_short_of_a_page()
    assert scheduler.plan(0) is None
    assert scheduler.waiting_ids() == ["c"]
    assert scheduler.cancel("c") == [news("c", [], "cancelled")]
    assert scheduler.waiting_ids() == []
    scheduler.check_integrity()
    assert scheduler.complete(landing, sampled({0: 31})) == []
    assert scheduler.plan(0) == step(9, 1, 8, [row(0, [14], 5, [0, 3, 2])])


def test_the_preempted_may_end_when_they_land():
    scheduler, landing = three_lanes_short_of_a_page()
    assert scheduler.plan(0) is None
    assert scheduler.complete(landing, sampled({0: 0})) == [news("c", [], "stop", 0)]
    assert scheduler.waiting_ids() == []
    scheduler.check_integrity()


def test_who_has_a_tokenizer_ends_a_request_with_another_reason():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1]))
    assert scheduler.cancel("a", "stop") == [news("a", [], "stop")]


# Checks.


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"token_budget": 2}, "token_budget = 2 is below slots = 3"),
        ({"token_buckets": [2, 8]}, r"token_buckets \[2, 8\] do not end at 4"),
        ({"page_buckets": [7]}, r"page_buckets \[7\] do not cover 16 tokens"),
    ],
)
def test_limits_that_do_not_fit_each_other(limits, message):
    with pytest.raises(ValueError, match=message):
        make_scheduler(**limits)


def test_integrity_names_the_request_and_what_is_wrong():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2, 3]))
    scheduler.plan(0)
    scheduler.check_integrity()
    (sequence,) = scheduler._groups[0].residents()
    sequence.in_flight = 0
    with pytest.raises(RuntimeError, match="request 'a' is counted in the wrong number of steps"):
        scheduler.check_integrity()
    sequence.in_flight = 1
    sequence.page_ids.pop()
    with pytest.raises(RuntimeError, match=r"lost pages \[1\]"):
        scheduler.check_integrity()
