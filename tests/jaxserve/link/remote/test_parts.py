"""The number of a cohort's parts, from passes and cycles of 15 domains with 3 lanes."""

from jaxserve.link.remote.parts import AGAIN, Parts
from tests import golden

DOMAINS, COHORTS, LIMIT = 15, 3.0, 16


def reviewed(parts, cycle, fixed, each, windows, *, now=0.0, messages=None):
    """Runs windows of 100 cycles each; returns the time and the numbers of parts after each."""
    counts = []
    for _ in range(windows):
        sizes = [messages or DOMAINS // parts.count] * 95 + [1] * 25
        for size in sizes:
            parts.passed(size, fixed + each * size)
            parts.layers += size > 1
        now += cycle(parts.count) * sum(sizes) / (DOMAINS * COHORTS)
        parts.review(now, iteration=1e-9, domains=DOMAINS, cohorts=COHORTS, limit=LIMIT)
        counts.append(parts.count)
    return now, counts


@golden.table("link/cohort_parts.yaml")
def test_a_cohort_is_divided_where_shorter_passes_gain_more_than_more_passes_cost(
    fixed, each, seconds, messages, count
):
    _, counts = reviewed(Parts(), lambda _: seconds, fixed, each, 3, messages=messages)
    assert counts == [1, 1, count]


def test_parts_that_gain_nothing_are_given_up_and_tried_again_much_later():
    parts = Parts()
    now, counts = reviewed(parts, lambda _: 1122e-6, 27e-6, 16.2e-6, 20)
    assert (counts[2], counts[-1]) == (3, 1)
    _, counts = reviewed(parts, lambda count: 1122e-6 / count, 27e-6, 16.2e-6, AGAIN, now=now)
    assert counts[10] == 1 < counts[-1]
