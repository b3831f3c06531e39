"""Which domain takes a request in."""

from jaxserve.engine.placement import choose_domain
from tests.jaxserve.engine.step_plans import make_request, make_scheduler


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
