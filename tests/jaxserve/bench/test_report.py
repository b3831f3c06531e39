"""Measures against their targets, and how they are printed."""

import msgspec
import pytest

from jaxserve.bench.report import (
    Measure,
    Part,
    Report,
    describe_machine,
    missed,
    table,
    this_machine,
    write_json,
)

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
    assert table(PART).splitlines() == [
        "(a) host time",
        "  driver ÷ naive       0.23  ≤ 0.25  met",
        "  3 lanes ÷ 1 lane     1.50  ≥ 1.7  MISSED",
        "  driver            42.2 µs",
        "  naive             1234 µs",
        "  load              0.012 s",
        "  on an idle machine",
    ]
    assert missed([PART]) == ["host: 3 lanes ÷ 1 lane"]


@pytest.mark.parametrize(
    ("value", "better", "met"),
    [(0.25, "less", True), (0.26, "less", False), (1.7, "more", True), (1.6, "more", False)],
)
def test_limits_include_themselves(value, better, met):
    limit = 0.25 if better == "less" else 1.7
    assert Measure("a", value, "", limit, better).met is met


def test_json_round_trip(tmp_path):
    report = Report("pipeline", True, this_machine(), [PART])
    write_json(tmp_path / "report.json", report)
    assert msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=Report) == report
    assert report.machine.jax in describe_machine(report.machine)
