from jaxserve.engine.admission import GroupLoad, choose_domain
from jaxserve.engine.pages import PageKeys
from jaxserve.engine.sequence import Sequence, token_array
from tests.jaxserve.engine.step_plans import make_request, make_scheduler


def group(slots=2):
    sizes = {"slots": slots, "token_budget": slots, "token_buckets": [slots], "page_buckets": [10]}
    return make_scheduler(pages=10, max_length=20, prefix_cache=True, **sizes).groups[0]


def sequence(max_generated=1, prompt=(1, 2, 3)):
    request, tokens = make_request("a", prompt), token_array(list(prompt))
    return Sequence(request, (0.0, 0), max_generated, tokens, PageKeys("", tokens, 2))


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


def scheduler(slots=2):
    sizes = {"slots": slots, "pages": 12, "page_size": 4, "max_length": 32, "max_waiting": 100}
    return make_scheduler(token_budget=16, token_buckets=[16], page_buckets=[8], **sizes).scheduler


def request(name, length=8):
    return make_request(str(name), [1] * length, max_tokens=4)


def fill(schedulers, lengths):
    """Where requests of these lengths go, each admitted before the next comes."""
    places = []
    for length in lengths:
        new = request(sum(each.num_running + each.num_waiting for each in schedulers), length)
        places.append(choose_domain(schedulers, new))
        schedulers[places[-1]].add(new)
        schedulers[places[-1]].plan(0)
    return places


def test_the_emptiest_takes_a_request():
    assert choose_domain([scheduler()], request(0, 1000)) == 0, "one takes all"
    domains = [scheduler(), scheduler(), scheduler()]
    assert fill(domains, [20, 8, 4, 4]) == [0, 1, 2, 2]


def test_one_with_a_slot_goes_before_those_without():
    assert fill([scheduler(slots=1), scheduler(slots=3)], [4, 20, 4]) == [0, 1, 1]


def test_where_all_are_full_the_one_with_the_fewest_waiting():
    domains = [scheduler(slots=1), scheduler(slots=1)]
    assert fill(domains, [4, 4, 4, 4, 4]) == [0, 1, 0, 1, 0]
    assert [each.num_waiting for each in domains] == [2, 1]
