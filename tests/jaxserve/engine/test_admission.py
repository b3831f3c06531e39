from jaxserve.engine.admission import GroupLoad
from jaxserve.engine.dp_group import DPGroup
from jaxserve.engine.lane_slots import LaneSlots
from jaxserve.engine.prefix_cache import PageKeys
from jaxserve.engine.sequence import Sequence, token_array
from tests.jaxserve.engine.step_plans import make_request


def group(slots=2):
    lanes = [LaneSlots(0, groups=1, slots=slots, page_size=2)]
    return DPGroup(0, lanes=lanes, pages=10, page_size=2, prefix_cache=True)


def sequence(max_generated=1, prompt=(1, 2, 3)):
    request, tokens = make_request("a", prompt), token_array(list(prompt))
    return Sequence(request, (0.0, 0), max_generated, tokens, PageKeys("", tokens, 2))


def test_an_empty_group_costs_what_is_taken_and_what_is_computed():
    assert GroupLoad(group()).cost(3, []) == 3 + 3
    assert GroupLoad(group()).cost(10, []) == 20
    assert GroupLoad(group()).cost(11, []) is None


def test_residents_count_with_what_they_will_need_and_a_page_to_spare():
    full = group()
    full.admit(sequence(max_generated=10), 0, 2, [])
    # 2 pages taken, 4 to come for 3 + 9 tokens.
    assert GroupLoad(full).cost(3, []) == 2 + 3 + 4 + 3
    assert GroupLoad(full).cost(7, []) == 2 + 7 + 4 + 7
    assert GroupLoad(full).cost(8, []) is None
    assert not full.full
    full.admit(sequence(), 0, 2, [])
    assert full.full


def test_cached_pages_are_taken_but_not_computed():
    group_ = group()
    before = sequence(prompt=(1, 2, 3, 4, 5))
    group_.admit(before, 0, 3, [])
    group_.publish(before, 5)
    group_.release(before)
    prefix = group_.match(sequence(prompt=(1, 2, 3, 4, 9)))
    assert len(prefix) == 2
    assert group_.free_pages == 10
    assert GroupLoad(group_).cost(3, prefix) == 3 + 1
