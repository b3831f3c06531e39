"""Processes that are started again: when, how often, and how nice."""

import os
import subprocess
import sys

import pytest

from jaxserve.launch.local import supervisor
from jaxserve.launch.local.members import Member
from jaxserve.launch.local.supervisor import Rules, Supervisor
from tests import golden

pytestmark = pytest.mark.usefixtures("signals")
STARTED = golden.text("launch/started.txt")


def supervised(command, members, logs) -> int:
    """The exit code of the first process; all the others are started again."""
    rules = Rules(range(1, len(members)), 0.0, ())
    return Supervisor(command, members, rules, logs=logs).run()


@pytest.mark.parametrize("allowed", [True, False])
def test_a_start_that_nobody_waits_for_is_nice(monkeypatch, tmp_path, allowed):
    if allowed and not supervisor.may_become_less_nice():
        pytest.skip("this user may not lower a niceness")
    monkeypatch.setattr(supervisor, "may_become_less_nice", lambda: allowed)
    file, before = tmp_path / "lines", os.nice(0)
    members = [
        Member("router", ["router"], 0),
        Member("worker", ["worker"], 1, role="worker", spared_by="worker"),
        Member("another", ["another"], 2, role="worker"),
    ]
    command = [sys.executable, "-c", STARTED, str(file), f"{before}"]
    assert supervised(command, members, tmp_path) == 0
    first, again = (line.split() for line in file.read_text().splitlines())
    assert first[::2] == [f"{before}"] * 2
    assert again[::2] == [f"{before + 5 * allowed}", f"{before}"]
    if os.geteuid() == 0:  # others may have to wait until they may
        groups = {("None", "None", "None"), ("0", "5" if allowed else "0", "0")}
        assert (first[1], *again[1::2]) in groups


AWAITED = golden.text("launch/awaited.txt")


@pytest.mark.parametrize("why", ["alone", "for long"])
def test_a_start_is_awaited_when_no_other_worker_serves_or_it_takes_long(
    monkeypatch, tmp_path, why
):
    if not supervisor.may_become_less_nice():
        pytest.skip("this user may not lower a niceness")
    monkeypatch.setattr(supervisor, "PATIENCE_SECONDS", 60.0 if why == "alone" else 0.3)
    shared = {"role": "worker", "spared_by": "worker"}
    members = [
        Member("router", ["router"], 0),
        Member("one", ["one"], 1, **shared),
        Member("two", ["two"], 2, **shared),
    ]
    command = [sys.executable, "-c", AWAITED, str(tmp_path), why, f"{os.nice(0)}"]
    assert supervised(command, members, tmp_path) == 0


def test_a_process_that_cannot_be_made_at_once_is_made_later(monkeypatch, tmp_path):
    monkeypatch.setattr(supervisor, "RETRY_SECONDS", 0.05)
    start, starts = supervisor.start, []

    def fails_once(*given):
        starts.append(given)
        if len(starts) == 3:
            raise BlockingIOError("no process is left")
        return start(*given)

    monkeypatch.setattr(supervisor, "start", fails_once)
    members = [Member("router", ["router"], 0), Member("worker", ["worker"], 1)]
    (tmp_path / "lines.others").touch()
    command = [sys.executable, "-c", STARTED, str(tmp_path / "lines"), f"{os.nice(0)}"]
    assert supervised(command, members, tmp_path) == 0
    assert len(starts) == 4


def test_who_may_become_less_nice():
    found = supervisor.may_become_less_nice()
    code = "import os; os.nice(1); os.setpriority(os.PRIO_PROCESS, 0, os.nice(0) - 1)"
    tried = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert found == (tried.returncode == 0)
