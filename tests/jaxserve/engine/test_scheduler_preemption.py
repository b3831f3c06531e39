"""Pages run out, and steps are lost: which sequence leaves when, with every step written out."""

import pytest

from jaxserve.roles.step_arrays import FROM_DEVICE
from tests.jaxserve.engine.step_plans import (
    FullScheduler,
    in_pool,
    make_request,
    make_scheduler,
    news,
    row,
    sampled,
    step,
)
from tests.jaxserve.full_steps import FullStep


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
    assert scheduler.complete(third, sampled({0: 14, 1: 24})) == [news("a", [14]), news("b", [24])]
    assert in_pool(scheduler, pages=5) == [3]
    fourth = scheduler.plan(0)
    assert fourth == step(4, 1, 8, [row(0, [14], 7, [0, 1, 3, 2])])
    assert scheduler.complete(fourth, sampled({0: 0})) == [news("a", [], "stop", 0)]
    # b comes back with prompt and output, five tokens in two chunks, and goes on.
    fifth, sixth = scheduler.plan(0), scheduler.plan(0)
    assert fifth == step(5, 4, 2, [row(0, [4, 21, 22, 23], 4, [0, 1], sample=False)])
    assert sixth == step(6, 1, 8, [row(0, [24], 5, [0, 1, 3])])
    assert scheduler.complete(fifth, sampled({})) == []
    assert scheduler.complete(sixth, sampled({0: 25})) == [news("b", [25])]


def three_lanes_short_of_a_page() -> tuple[FullScheduler, FullStep]:
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
    for _ in ("c leaves", "two pages, and two to spare, are more than one"):
        assert scheduler.plan(2) is None
        assert scheduler.waiting_ids() == ["c"]
        assert in_pool(scheduler, pages=5) == [4]


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


def test_a_lost_step_is_planned_again_and_says_everything_again():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [5, 6, 7]))
    scheduler.complete(scheduler.plan(0), sampled({0: 11}))
    first = scheduler.plan(0)
    second = scheduler.plan(0)
    assert first == step(1, 1, 2, [row(0, [11], 4, [0, 1])])
    assert second == step(2, 1, 8, [row(0, [FROM_DEVICE], 5, [0, 1, 2])])
    with pytest.raises(ValueError, match="step 1 was lost, the newest: 2"):
        scheduler.lost(first)
    scheduler.lost(second)
    scheduler.lost(first)
    scheduler.check_integrity()
    with pytest.raises(ValueError, match="step 1 was lost, the newest: none"):
        scheduler.lost(first)
    again = scheduler.plan(0)
    assert again == step(3, 1, 2, [row(0, [11], 4, [0, 1])])
    assert [one.row for one in again.plan.new_sequences] == [0]
    assert scheduler.complete(again, sampled({0: 12})) == [news("a", [12])]
    assert scheduler.plan(0) == step(4, 1, 8, [row(0, [12], 5, [0, 1, 2])])


def test_a_lost_prefill_is_begun_again():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2, 3, 4, 5, 6], presence_penalty=1.0))
    first = scheduler.plan(0)
    assert first.groups[0][0].rules.fresh
    scheduler.lost(first)
    again = scheduler.plan(0)
    assert again.groups == first.groups
    assert scheduler.num_preemptions == 1, "what the device counted may be wrong"
    scheduler.cancel("a")
    assert in_pool(scheduler) == [4]
    scheduler.lost(again)
    assert (in_pool(scheduler), scheduler.has_work) == ([0], False), "it leaves with its step"
