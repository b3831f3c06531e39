"""Requests that stand for all, and spare servers."""

import math

import pytest

from jaxserve.planner.demand import Demand
from jaxserve.planner.demand import Spares as Spares
from tests import golden


def test_equal_ones():
    requests = Demand(rate=1, prompt=1000, output=200, hits=0.5).requests(5000, 64)
    assert set(requests.prompt) == {1000}
    assert set(requests.found) == {448}  # seven whole pages
    assert requests.context == 1100
    assert requests.context_spread == pytest.approx(200 / 12**0.5)
    requests = Demand(rate=1, prompt=128, output=1, hits=0.99).requests(5000, 64)
    assert set(requests.found) == {64}  # never all of a prompt


def test_what_runs_at_a_moment():
    """Lengths by how long they run: half of each output is there on the mean."""
    requests = Demand(rate=1, prompt=1000, output=200, spread=0.5).requests(5000, 64)
    length, left = requests.running(500)
    assert length.mean() == pytest.approx(requests.context, rel=0.02)
    assert length.std() == pytest.approx(requests.context_spread, rel=0.1)
    # E[output²] / E[output] / 2 = 200 × 1.25 / 2
    assert left.mean() == pytest.approx(125, rel=0.05)
    more = Demand(rate=1, prompt=1010, output=200, spread=0.5).requests(5000, 64)
    assert more.running(500)[0].mean() / length.mean() == pytest.approx(1.01, abs=0.005)


def test_quantiles_of_prompts():
    requests = Demand(rate=1, prompt=1000, output=200, spread=0.5, hits=0.5).requests(9000, 64)
    prompt, found = requests.quantile(0.95)
    # Lognormal: 1000 e^(1.645 σ - σ²/2) with σ² = ln 1.25
    assert prompt == pytest.approx(1000 * math.exp(1.645 * 0.4724 - 0.1116), rel=0.02)
    assert found == prompt // 2 // 64 * 64


def test_spare_servers():
    golden.check_values("planner/spares.txt", lambda value: value, globals())
