"""Measures against their targets, and how they are printed."""

import pytest

from jaxserve.bench.report import Measure, Part, missed, table
from tests import golden

PART = Part(
    "host",
    "(a) host time",
    [
        Measure("driver ÷ naive", 0.2345, "", 0.25),
        Measure("3 lanes ÷ 1 lane", 1.5, "", 1.7, "more"),
        Measure("driver", 42.25, "µs"),
        Measure("naive", 1234.5, "µs"),
        Measure("load", 0.0123, "s"),
    ],
    notes=["on an idle machine"],
)


def test_table():
    golden.check("bench/report.txt", table(PART) + "\n")
    assert missed([PART]) == ["host: 3 lanes ÷ 1 lane"]


@pytest.mark.parametrize(
    ("value", "better", "met"),
    [(0.25, "less", True), (0.26, "less", False), (1.7, "more", True), (1.6, "more", False)],
)
def test_limits_include_themselves(value, better, met):
    limit = 0.25 if better == "less" else 1.7
    assert Measure("a", value, "", limit, better).met is met
