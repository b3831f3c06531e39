"""The command line, and one part from end to end."""

import json
import math

import pytest

from jaxserve.bench import __main__ as command
from jaxserve.bench.report import Measure, Part
from jaxserve.bench.workers import BenchError
from tests import golden


@pytest.fixture
def parts(monkeypatch):
    """Two parts that measure nothing; gives what they were asked."""
    asked = []

    def part(name, value):
        def measure(quick):
            asked.append((name, quick))
            yield Part(name, name, [Measure("number", value, "", 1.0)])

        return measure

    both = {"one": part("one", 1.0), "two": part("two", 2.0)}
    monkeypatch.setitem(command.BENCHES, "pipeline", command.Bench("", both))
    return asked


def test_all_parts(parts, capsys):
    assert command.main(["pipeline"]) == 1
    assert parts == [("one", False), ("two", False)]
    printed = capsys.readouterr()
    assert "number  1.00  ≤ 1  met" in printed.out
    assert printed.err == "\nmissed: two: number\n"
    assert command.main(["pipeline", "--quick", "--only", "one"]) == 0
    assert parts[2:] == [("one", True)]


def test_a_part_that_cannot_run(monkeypatch, capsys):
    def measure(quick):
        raise BenchError("needs two cores")

    monkeypatch.setitem(command.BENCHES, "pipeline", command.Bench("", {"one": measure}))
    assert command.main(["pipeline"]) == 2
    assert "bench: needs two cores" in capsys.readouterr().err


def test_wrong_options(capsys):
    """`golden/bench/wrong.txt` lists them."""

    def said(words):
        try:
            code = command.main(words.split())
        except SystemExit as ended:
            code = ended.code
        assert code == 2
        return capsys.readouterr().err.splitlines()[-1]

    golden.check_each("bench/wrong.txt", said)


DAILY = "host --only host"
EVERY = [
    *(f"{name} --only {part}" for name, bench in command.BENCHES.items() for part in bench.parts),
    "compare --python false",
]


@pytest.mark.parametrize(
    "words",
    [pytest.param(words, marks=() if words == DAILY else pytest.mark.nightly) for words in EVERY],
)
def test_every_bench_runs_quickly(words, tmp_path):
    """The numbers mean nothing with few rounds, but each has a value."""
    file = tmp_path / "report.json"
    assert command.main([*words.split(), "--quick", "--json", str(file)]) in (0, 1)
    report = json.loads(file.read_text())
    assert report["quick"] is True
    values = [measure["value"] for part in report["parts"] for measure in part["measures"]]
    assert values
    assert all(math.isfinite(value) for value in values)


@pytest.mark.nightly
def test_stages_run(tmp_path):
    few = "--batches 4 --contexts 16 --steps 1 --rounds 1"
    assert command.main(["stages", "--timeline", str(tmp_path / "stages"), *few.split()]) == 0
