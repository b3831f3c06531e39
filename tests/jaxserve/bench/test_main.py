"""The command line, one part from end to end, and how parts evaluate their samples."""

import json
import math

import pytest

from jaxserve.bench import __main__ as command
from jaxserve.bench import compare, drafts
from jaxserve.bench.pipelines import ideal_gains
from jaxserve.bench.report import Measure, Part, table
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


DAILY = "host", "router", "front", "experts", "load"
EVERY = [
    *(f"{name} --only {part}" for name, bench in command.BENCHES.items() for part in bench.parts),
    "compare --python false",
]


@pytest.mark.parametrize(
    "words",
    [pytest.param(w, marks=() if w.startswith(DAILY) else pytest.mark.nightly) for w in EVERY],
)
def test_every_bench_runs_quickly(words, tmp_path):
    """The numbers mean nothing with few rounds, but each has a value."""
    assert command.main([*words.split(), "--quick", "--json", f"{tmp_path}/found"]) in (0, 1)
    report = json.loads((tmp_path / "found").read_text())
    assert report["quick"] is True
    values = [measure["value"] for part in report["parts"] for measure in part["measures"]]
    assert values
    assert all(math.isfinite(value) for value in values)


@pytest.mark.nightly
def test_stages_run(tmp_path):
    few = "--batches 4 --contexts 16 --steps 1 --rounds 1"
    assert command.main(["stages", "--timeline", str(tmp_path / "stages"), *few.split()]) == 0


def drafted(one: list[float], many: list[float], **more) -> dict:
    counts = {"runs": 0, "accepted": [], "compilations": 0}
    return {"tokens_per_second": {"1": one, "32": many}} | counts | more


def test_drafts_are_compared_round_by_round_and_by_verified_steps():
    one, many = [140.0, 100.0, 80.0], [900.0, 400.0, 800.0]
    part = drafts.part_of(
        {
            "none": drafted([100.0, 50.0, 80.0], [1000.0, 400.0, 800.0]),
            "ngram, 3 drafts": drafted([90.0, 60.0, 80.0], [900.0, 500.0, 700.0], runs=10),
            "mtp, 1 draft": drafted(one, many, runs=10, accepted=[7]),
        }
    )
    golden.check("bench/drafts.txt", table(part) + "\n")


def test_a_prompt_counts_its_own_tokens_and_a_batch_what_it_generates():
    seconds = {"ours": [2.0, 1.0], "transformers": [4.0, 3.0], "llama.cpp": [2.0, 2.0]}
    seconds |= {"same": {"transformers": 1.0, "llama.cpp": 0.5}}
    targets = {"transformers": 4.0, "llama.cpp": 1.2}
    batches = [compare.Batch(8, 16, 64, targets), compare.Batch(1, 512, 1, targets)]
    found = {batch.name: seconds for batch in batches}
    found["ours"] = {"seconds": 3.0, "sizes": "colocated, 32 slots"}
    found |= {"transformers": {"torch": "2.15"}, "llama.cpp": {"llama_cpp": "0.3"}}
    golden.check("bench/compare.txt", table(compare.part_of(found, batches, "in FP32")) + "\n")


@pytest.mark.parametrize(
    ("attend", "ffn", "link", "two", "three"),
    [
        (2.0, 2.0, 0.0, 2.0, 2.0),  # balanced, nothing on the way: two lanes are enough
        (2.0, 2.0, 1.0, 2.0, 2.5),  # the link is a third stage
        (2.0, 2.0, 2.0, 2.0, 3.0),  # three equal stages, one for each lane
        (3.0, 1.0, 0.0, 4 / 3, 4 / 3),  # attention is all that counts
        (2.0, 2.0, 4.0, 2.0, 2.0),  # the link is the bottleneck
    ],
)
def test_gains_that_lanes_are_measured_against(attend, ffn, link, two, three):
    assert ideal_gains(attend, ffn, link) == pytest.approx({2: two, 3: three})
