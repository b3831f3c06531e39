"""Spare servers."""

import math

import pytest

from jaxserve.errors import ConfigError
from jaxserve.planner.deploy_spares import Spares, spares


def test_as_asked():
    assert Spares(count=2).hosts(100) == 2
    assert Spares(count=2).hosts(0) == 0
    assert Spares().text == "none asked for"


def test_by_failures():
    """100 servers, each away for 10 of 1,010 hours: Poisson's number with mean 100/101."""
    away = 100 / 101
    enough = [math.exp(-away) * away**n / math.factorial(n) for n in range(6)]
    assert sum(enough[:5]) < 0.999 <= sum(enough[:6])
    assert spares(0, "1000h:10h").hosts(100) == 5
    assert spares(6, "1000h:10h").hosts(100) == 6


def test_very_many():
    """700 away on the mean: 3.09 standard deviations more."""
    found = Spares(between=9.0, repair=1.0).hosts(7000)
    assert found == math.ceil(700 + 3.0902 * 700**0.5)


def test_wrong():
    for text in ("1000:10", "10h:1000h", "h:1h", "1000h", "1..0h:1h"):
        with pytest.raises(ConfigError, match="--failures"):
            spares(0, text)
    with pytest.raises(ConfigError, match="--spares -1"):
        spares(-1, "")
