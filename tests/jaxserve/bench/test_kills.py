"""The arithmetic of `bench kills`; the storm itself is run by hand."""

import math

from jaxserve.bench.kills import gaps


def test_the_longest_silence_after_each_kill():
    arrivals = [0.5, 1.0, 1.1, 1.9, 2.0, 3.2, 3.3]
    assert gaps([1.05, 2.1], arrivals) == [1.9 - 1.1, 3.2 - 2.1]


def test_the_kill_itself_begins_the_silence():
    assert gaps([1.0], [0.9, 2.5, 2.6]) == [1.5]


def test_nothing_ever_came_again():
    assert gaps([1.0], [0.5]) == [math.inf]
