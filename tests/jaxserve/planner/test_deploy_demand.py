"""Requests that stand for all, targets as they are typed, and spare servers."""

import argparse
import math

import numpy as np
import pytest

from jaxserve.planner.deploy_demand import Demand, Level, Spares, failures, level
from jaxserve.planner.noise import Lengths


def test_lengths_are_those_of_a_simulation():
    requests = Demand(rate=1, prompt=1000, output=200, spread=0.5).requests(5000, 64)
    random, lengths = (
        np.random.default_rng(0),
        Lengths(prompt=1000, output=200, spread=0.5, longest=5000),
    )
    drawn = np.array([lengths.draw(random) for _ in range(4000)])
    for mine, theirs in ((requests.prompt, drawn[:, 0]), (requests.output, drawn[:, 1])):
        assert mine.mean() == pytest.approx(theirs.mean(), rel=0.03)
        assert mine.std() == pytest.approx(theirs.std(), rel=0.08)
    assert abs(np.corrcoef(requests.prompt, requests.output)[0, 1]) < 0.05


def test_equal_ones():
    requests = Demand(rate=1, prompt=1000, output=200, hits=0.5).requests(5000, 64)
    assert set(requests.prompt) == {1000}
    assert set(requests.found) == {448}  # seven whole pages
    assert set(requests.computed) == {552}
    assert requests.context == 1100
    assert requests.context_spread == pytest.approx(200 / 12**0.5)


def test_long_outputs_run_longer():
    requests = Demand(rate=1, prompt=1, output=100, spread=1.0).requests(10**6, 64)
    # E[output² / 2] ÷ E[output] = 100 (1 + 1) / 2
    assert requests.context == pytest.approx(100, rel=0.05)


def test_all_of_a_prompt_is_never_found():
    requests = Demand(rate=1, prompt=128, output=1, hits=0.99).requests(5000, 64)
    assert set(requests.found) == {64}


def test_the_longest():
    assert Demand(rate=1, prompt=1000, output=200).longest(64) == 1216
    assert Demand(rate=1, prompt=1000, output=200, spread=0.5).longest(64) > 4000


def test_levels():
    assert level("p95=2s") == Level(95.0, 2.0)
    assert level("p99.9=50ms") == Level(99.9, 0.05)
    assert level("50ms") == Level(95.0, 0.05)
    assert Level(95.0, 0.05).text == "p95=50ms"
    assert failures("1000h:12h") == (1000, 12)
    texts = "p5=2s", "p100=2s", "mean=2s", "p95", "p95=0s", "95=2s"
    times = "1000:10", "10h:1000h", "h:1h", "1000h", "1..0h:1h"
    for read, wrong in ((level, texts), (failures, times)):
        for text in wrong:
            with pytest.raises(argparse.ArgumentTypeError, match="expected"):
                read(text)


def test_as_asked():
    assert Spares(count=2).hosts(100) == 2
    assert Spares(count=2).hosts(0) == 0
    assert Spares().text == "none asked for"


def test_by_failures():
    """100 servers, each away for 10 of 1,010 hours: Poisson's number with mean 100/101."""
    away = 100 / 101
    enough = [math.exp(-away) * away**n / math.factorial(n) for n in range(6)]
    assert sum(enough[:5]) < 0.999 <= sum(enough[:6])
    assert Spares(between=1000, repair=10).hosts(100) == 5
    assert Spares(count=6, between=1000, repair=10).hosts(100) == 6


def test_very_many():
    """700 away on the mean: 3.09 standard deviations more."""
    found = Spares(between=9.0, repair=1.0).hosts(7000)
    assert found == math.ceil(700 + 3.0902 * 700**0.5)
