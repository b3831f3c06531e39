"""Spares of a fleet whose processes, this module, only say how they were started."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.jaxserve.fleet.launched import alive, started


@pytest.mark.nightly
def test_a_spare_becomes_what_was_killed_and_none_outlives_a_killed_launcher() -> None:
    def children() -> set[int]:
        listed = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text()
        return set(map(int, listed.split()))

    def spare() -> int:
        while not (found := {pid for pid in children() if f"pid {pid} " not in run.output}):
            time.sleep(0.1)
        return found.pop()

    command = ["-m", "jaxserve.launch.local", "--fleet", "--restart", "--config", "demo-fleet"]
    with started([*command, "--module", __name__], {"JAX_PLATFORMS": "cpu"}) as run:
        for number in range(3):
            run.wait_for(rf"^\[{number}\] pid \d+ cold")
        os.kill(first := spare(), signal.SIGKILL)
        run.wait_for(rf"a spare, pid {first}, ended with signal SIGKILL")
        second = spare()
        os.kill(run.pid(1), signal.SIGKILL)
        run.wait_for(rf"^\[1\] pid {second} warm, {__name__} 0$")
        assert spare() not in (first, second)
        left = children()
        run.process.kill()
        assert [alive(pid, 5.0) for pid in left] == [False] * 4, run.output


if __name__ == "__main__":
    how = "warm" if "jax" in sys.modules else "cold"
    print(f"pid {os.getpid()} {how}, {sys.orig_argv[3]} {sys.argv[-1]}")
    time.sleep(120)
