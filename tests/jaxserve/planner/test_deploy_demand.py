"""Requests that stand for all, and targets as they are typed."""

import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.planner.deploy_demand import Demand, Level, level
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
    assert level("p95=2s", "--ttft") == Level(95.0, 2.0)
    assert level("p99.9=50ms", "--tpot") == Level(99.9, 0.05)
    assert level("50ms", "--tpot") == Level(95.0, 0.05)
    assert Level(95.0, 0.05).text == "p95=50ms"
    for text in ("p5=2s", "p100=2s", "mean=2s", "p95", "p95=0s", "95=2s"):
        with pytest.raises(ConfigError, match="--ttft"):
            level(text, "--ttft")
