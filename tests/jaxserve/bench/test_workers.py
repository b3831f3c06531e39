"""Workers of a benchmark: results, failures, and deadlines that no process outlives."""

import os
import time

import pytest

from jaxserve.bench.workers import BenchError, Helper, Task, run_worker, run_workers
from tests.conftest import REPOSITORY
from tests.jaxserve.bench.worker import repeat, work


@pytest.fixture(autouse=True)
def find_tests(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))


def worker(mode: str, **options) -> Task:
    return Task(work, {"mode": mode}, **options)


def children() -> set[str]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return set(file.read().split())


def test_results_come_back_in_order():
    assert run_workers([worker("a"), worker("b")], 60) == [{"mode": "a"}, {"mode": "b"}]


def test_a_failure_says_why():
    with pytest.raises(BenchError, match=r'work {"mode":"fail"} ended with 1:\n  no luck'):
        run_workers([worker("sleep"), worker("fail")], 60)


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs /proc")
def test_nobody_outlives_the_deadline():
    before, start = children(), time.monotonic()
    with pytest.raises(BenchError, match=r'work {"mode":"sleep"} took more than 2 s'):
        run_workers([worker("sleep"), worker("sleep")], 2)
    assert time.monotonic() - start < 30
    assert children() <= before  # another test's may have ended since


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cannot pin")
def test_a_pinned_worker_runs():
    assert run_worker(worker("a", core=min(os.sched_getaffinity(0))), 60) == {"mode": "a"}


def test_a_helper_answers_until_it_ends():
    with Helper(Task(repeat, {"times": 2}).command(), 60) as helper:
        assert helper.ask("ab") == "abab"
        with pytest.raises(BenchError, match=r"repeat .*: ended early, or after more than 60 s"):
            helper.ask("ab")
