"""Waiting, against formulas of queueing theory."""

import math

import numpy as np
import pytest

from jaxserve.planner.deploy_queue import NONE, erlang_c, waiting


def test_formula_c():
    assert erlang_c(0.5, 1) == pytest.approx(0.5)
    # M/M/2 with load 1: 1/3.
    assert erlang_c(1.0, 2) == pytest.approx(1 / 3)
    # By its sum, for 10 servers with load 8.
    terms = [8.0**n / math.factorial(n) for n in range(10)]
    last = 8.0**10 / math.factorial(10) / (1 - 0.8)
    assert erlang_c(8.0, 10) == pytest.approx(last / (sum(terms) + last))


def test_one_server():
    """M/D/1 and M/M/1: ρ/(2(1 − ρ)) and ρ/(1 − ρ) services (Pollaczek and Khinchine)."""
    even = waiting(0.8, np.ones(4), 1)
    assert even.chance * even.mean == pytest.approx(0.8 / 0.4)
    random = np.array([0.0, 2.0])  # of variation 1
    varied = waiting(0.8, random, 1)
    assert varied.chance * varied.mean == pytest.approx(0.8 / 0.2)
    assert varied.busy == pytest.approx(0.8)


def test_too_many_and_none():
    assert waiting(1.0, np.ones(3), 1) is None
    assert waiting(0.0, np.ones(3), 1) == NONE


def test_percentiles_of_waits():
    """M/M/1: the part that waits longer than t is ρ e^(−(1 − ρ) t)."""
    queue = waiting(0.5, np.array([0.0, 2.0]), 1)
    waits = queue.draw(np.random.default_rng(0), 200_000)
    assert np.mean(waits > 2) == pytest.approx(0.5 * math.exp(-1), abs=0.005)
