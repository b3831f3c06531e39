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


def test_only_one_part_quickly(parts):
    assert command.main(["pipeline", "--quick", "--only", "one"]) == 0
    assert parts == [("one", True)]


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


def test_step_host_quickly(tmp_path, capsys):
    file = tmp_path / "host.json"
    assert command.main(["host", "--quick", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert [part["name"] for part in report["parts"]] == ["32", "256"]
    measures = {m["name"]: m["value"] for m in report["parts"][1]["measures"]}
    parts = [measures[name] for name in ("plan", "arrays", "encode", "complete")]
    assert min(parts) > 0
    assert "256 sequences a lane, 16 groups (configs/step3-v7x.yaml)" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.unoptimised
def test_host_time_quickly(tmp_path, capsys):
    """Real loops, few rounds: the numbers mean nothing, but they are there."""
    file = tmp_path / "report.json"
    assert command.main(["pipeline", "--quick", "--only", "host", "--json", str(file)]) in (0, 1)
    report = json.loads(file.read_text())
    assert report["quick"] is True
    (part,) = report["parts"]
    values = {measure["name"].strip(): measure["value"] for measure in part["measures"]}
    assert "driver ÷ bare loop, wall" in values
    assert all(math.isfinite(value) and value > 0 for value in values.values())
    assert "host time per layer and lane" in capsys.readouterr().out
