"""The search for tiles: in plain Python, and the whole command on kernels that are interpreted."""

import json
import math
import sys

import pytest

from pallas_kernels.bench import __main__ as bench
from pallas_kernels.bench import tune
from pallas_kernels.bench.search import OutOfTime, Settings, Trials, search
from tests import golden

CHOICES = {"rows": [1, 2, 4, 8], "columns": [1, 2, 4]}


def bowl(tiles):
    """Least at rows 4, columns 2; what needs more than 16 does not fit."""
    if tiles["rows"] * tiles["columns"] > 16:
        return math.inf
    return 1 + abs(tiles["rows"] - 4) + abs(tiles["columns"] - 2)


def test_search_finds_the_least():
    found = search({"rows": 1, "columns": 4, "other": 7}, CHOICES, bowl)
    assert found == ({"rows": 4, "columns": 2, "other": 7}, 6, 1, True)
    assert found.better()


def test_search_keeps_what_is_as_good():
    """A hundredth is no reason to change a table."""
    found = search({"rows": 1, "columns": 1}, CHOICES, lambda tiles: 1 - tiles["rows"] / 1000)
    assert found.tiles == {"rows": 1, "columns": 1}
    assert not found.better()


def test_search_leaves_what_fails():
    found = search({"rows": 8, "columns": 4}, CHOICES, bowl)
    assert found.tiles == {"rows": 4, "columns": 2}
    assert found.before == math.inf


def test_search_out_of_time_is_not_finished():
    left = iter(range(3))

    def cost(tiles):
        if next(left, None) is None:
            raise OutOfTime
        return bowl(tiles)

    found = search({"rows": 1, "columns": 4}, CHOICES, cost)
    assert (found.tiles, found.finished) == ({"rows": 4, "columns": 4}, False)
    assert not found.better()


def test_trials_are_kept(tmp_path):
    path = tmp_path / "folder" / "trials.jsonl"
    trial = {"case": "a", "tiles": {"rows": (1, 2)}}
    assert Trials(path).get(trial, lambda: {"seconds": 1.5}) == {"seconds": 1.5}
    # As it reads it again, a tuple is a list.
    again = {"tiles": {"rows": [1, 2]}, "case": "a"}
    assert Trials(path).get(again, lambda: pytest.fail("was tried")) == {"seconds": 1.5}


SPEAKER = golden.text("pallas_kernels/speaker.txt")


def test_a_worker_that_hangs_or_dies_is_started_again(monkeypatch):
    worker = tune.Worker.__new__(tune.Worker)
    worker.command = [sys.executable, "-c", SPEAKER]
    assert worker._start() == {"calls": {}}
    assert worker.attempt("fine", {}, 20) == {"seconds": 2.0}
    assert worker.attempt("hang", {}, 0.2) == {"failed": "over 0 s"}
    assert worker.attempt("fine", {}, 20) == {"seconds": 2.0}
    assert worker.attempt("die", {}, 20) == {"failed": "the process died"}
    assert worker.attempt("fine", {}, 20) == {"seconds": 2.0}
    worker.stop()


@pytest.mark.nightly
@pytest.mark.unoptimised
def test_the_command_on_interpreted_kernels(tmp_path, capsys):
    arguments = ["--tune", "--quick", "--op", "attention", "--case", "qwen3-235b-tp4"]
    arguments += ["--trials", str(tmp_path / "trials"), "--tables", str(tmp_path)]
    assert bench.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "paged_attention decode heads 2/1 widths 128/128 bfloat16: " in shown
    trials = [json.loads(line) for line in (tmp_path / "trials").read_text().splitlines()]
    assert all("seconds" in one["result"] for one in trials), trials
    blocks = {one["trial"]["tiles"]["block_tokens"] for one in trials}
    assert blocks == {512, 1024, 2048}
    # Formats: bf16, int8; the interpreted TPU is none that has FP8.
    assert len(trials) == 6
    count = len((tmp_path / "trials").read_text())
    assert bench.main(arguments) == 0
    assert len((tmp_path / "trials").read_text()) == count


class Fake:
    """A worker on a device where `rows` of 4 are the fastest, and 8 do not fit."""

    def __init__(self, arguments):
        tiles = {"rows": 1, "columns": 2}
        entry = {"op": "attention", "default": tiles, "tiles": tiles, "choices": CHOICES}
        self.about = {
            "device_kind": "TPU v9",
            "jax": "0.12",
            "skipped": {"attention b": "no such format"},
            "calls": {"call": entry | {"cases": ["attention a", "attention large"]}},
        }

    def attempt(self, label, tiles, limit):
        if "large" in label:
            return {"failed": "out of memory"}
        cost = bowl(tiles["call"])
        return {"seconds": cost} if tiles["call"]["rows"] < 8 else {"failed": "does not fit"}

    def stop(self): ...


def test_what_is_better_is_written(tmp_path, monkeypatch, capsys):
    """A size that fails as it is, is left out."""
    monkeypatch.setattr(tune, "Worker", Fake)
    settings = Settings(tmp_path / "trials", tmp_path, 10, 1000, False)
    assert tune.tune_on_device(["attention"], None, settings) == 0
    (entry,) = json.loads((tmp_path / "attention.json").read_text())["TPU v9"].values()
    assert entry["tiles"] == {"rows": 4}
    assert (entry["before"], entry["after"]) == (4, 1)
    shown = capsys.readouterr().out
    assert "attention b: skipped: no such format" in shown
    assert "{'rows': 8}: does not fit" in shown
    assert "attention large {}: out of memory" in shown


def test_a_search_without_time_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tune, "Worker", Fake)
    settings = Settings(tmp_path / "trials", tmp_path, 10, 5, False)
    assert tune.tune_on_device(["attention"], None, settings) == 1
    assert "time is up: the same command goes on from" in capsys.readouterr().out
    assert not (tmp_path / "attention.json").exists()


def test_on_a_cpu_there_is_nothing_to_tune(tmp_path, capsys):
    arguments = ["--tune", "--op", "attention", "--case", "step3"]
    assert bench.main([*arguments, "--trials", str(tmp_path / "trials")]) == 1
    assert "nothing to tune on cpu" in capsys.readouterr().out


@golden.table("pallas_kernels/tune_arguments.yaml")
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert message in capsys.readouterr().err
