"""A process that meets a limit is replaced, and the error names the limit."""

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from jaxserve.text import limited_process
from jaxserve.text.limited_process import LimitedProcess, LimitError
from tests import golden

TASK = golden.text("text/task_of_limits.txt")


@pytest.fixture
def process(tmp_path: Path) -> LimitedProcess:
    task = types.ModuleType("task")
    task.__file__ = str(tmp_path / "task.py")
    Path(task.__file__).write_text(TASK, encoding="utf-8")
    return LimitedProcess(task, "tests")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_process_that_dies_is_replaced_and_the_limit_is_named(process, monkeypatch):
    first = process.ask({"kind": ""})["pid"]
    assert process.ask({"kind": ""})["pid"] == first
    before = descriptors()
    for kind, message in (
        ("SIGPROF", r"^it took more than 2 s$"),
        ("SIGABRT", r"^it took more than 512 MiB$"),
        ("SIGSEGV", r"^it took more than 1024 KiB of stack: it is nested too deeply$"),
        ("exit", r"^its process ended$"),
    ):
        with pytest.raises(LimitError, match=message):
            process.ask({"kind": kind})
        assert process.ask({"kind": ""})["pid"] != first
    assert process.ask({"kind": "memory"}) == {"error": "it took more than 512 MiB"}
    monkeypatch.setattr(limited_process, "ANSWER_SECONDS", 0.5)
    with pytest.raises(LimitError, match=r"^it took longer than 20 s$"):
        LimitedProcess(process._task, "other tests").ask({"kind": "sleep"})
    assert descriptors() == before


BLOCKS = golden.text("text/blocked_signals.txt")


def test_limits_hold_whatever_signals_the_caller_blocks(process):
    command = [sys.executable, "-c", BLOCKS, str(process._task.__file__)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "it took more than 2 s\nit took more than 512 MiB\n"


def test_a_process_does_not_see_the_environment(process):
    assert process.ask({"kind": ""})["environment"] == {"LC_ALL": "C.UTF-8"}


def test_nobody_waits_for_ever_for_a_turn(process, monkeypatch):
    process.ask({"kind": ""})
    with process._lock:  # another thread's turn
        monkeypatch.setattr(limited_process, "ANSWER_SECONDS", 0.01)
        with pytest.raises(LimitError, match=r"^it waited more than 0.01 s for its turn$"):
            process.ask({"kind": ""})
    monkeypatch.undo()
    assert process.ask({"kind": ""})["pid"]
