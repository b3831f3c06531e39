"""Who is who among the launcher's processes, and the hook of the wall clock."""

import os
import subprocess
import sys

import pytest

from jaxserve.chaos.deployment import _STARTED, SHIM, role_of


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("router", "router"),
        ("prefill worker 0", "prefill"),
        ("prefill worker 1, process 0", "prefill"),
        ("prefill worker 1, process 1", "follower"),
        ("domain 0, role decode", "domain"),
        ("domain 2, role attention", "attention"),
        ("domain 0, role decode, process 3", "follower"),
        ("ffn worker, role ffn", "ffn"),
    ],
)
def test_roles(name, role):
    assert role_of(name) == role


def test_where_a_process_listens():
    line = "process 1: prefill worker 0, pid 7, listens on 1:2 for 1:3, pages on 1:4 for 1:5"
    names = ("number", "name", "pid", "listens", "dialled", "pages", "pages_dialled")
    found = _STARTED.search(line)
    assert [found[name] for name in names] == [
        *("1", "prefill worker 0", "7", "1:2", "1:3", "1:4", "1:5")
    ]
    for left in (", listens on 1:2 for 1:3", ""):
        found = _STARTED.search(f"process 1: prefill worker 0, process 1, pid 7{left}")
        assert found["name"] == "prefill worker 0, process 1"
        assert found["pages"] is None


def test_the_wall_clock_jumps_and_the_monotonic_one_does_not(tmp_path):
    jump = tmp_path / "clock"
    program = (
        "import time, pathlib; wall, steady = time.time(), time.monotonic(); "
        f"pathlib.Path({str(jump)!r}).write_text('-3600'); "
        "print(round((time.time() - wall) / 3600), time.monotonic() - steady < 60)"
    )
    environment = {**os.environ, "PYTHONPATH": str(SHIM), "JAXSERVE_CHAOS_CLOCK": str(jump)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["-1", "True"], done.stderr
