"""Spares of a fleet whose processes, this module, only say how they were started."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxserve.fleet.signals import tell_ready
from jaxserve.launch.local.spare import READY, Spare, Spares
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
        run.wait_for(rf"a spare is ready, pid {second}")
        os.kill(run.pid(1), signal.SIGKILL)
        run.wait_for(rf"^\[1\] pid {second} warm, {__name__} 0$")
        assert spare() not in (first, second)
        left = children()
        run.process.kill()
        assert [alive(pid, 5.0) for pid in left] == [False] * 4, run.output


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_warm_spares_of_both_roles_compile_no_step_when_they_are_needed() -> None:
    settings = ("domains=1", "prefill.workers=0", "attention.dp=2", "attention.processes=2")
    settings += ("ffn.processes=2", "ffn.ep=2", "link.addresses=['h:1','h:2']")
    settings += ("scheduler.token_budget=16", "scheduler.token_buckets=[16]")
    settings += ("scheduler.max_length=256", "scheduler.page_buckets=[16]")
    settings += ("server.http_port=0", "server.grpc_port=0")
    command = ["-m", "jaxserve.launch.local", "--fleet", "--restart", "--warm-spares"]
    command += ["--config", "demo-fleet-afd", *(f"--set={one}" for one in settings)]
    with started(command, {"JAX_PLATFORMS": "cpu"}) as run:
        run.wait_for(r"(?s)^\[0\] ready  .*(a spare is ready, pid.*){4}", 300.0)
        warm = set(map(int, re.findall(r"a spare is ready, pid (\d+)", run.output)))
        for victim, partner in ((4, 3), (2, 1)):  # followers, whose leaders are started anew, too
            pid = re.findall(rf"process {victim}: .*, pid (\d+)", run.output)[0]
            os.kill(int(pid), signal.SIGKILL)
            run.wait_for(rf"(?s)starting it again.*^\[{partner}\] ready  .*\Z")
        again = run.output.partition("starting it again")[2]
        assert set(map(int, re.findall(r"process [1-4]: .*, pid (\d+)", again))) == warm
        counts = re.findall(r"\[[1-4]\].* compile: \d+ of (\d+)", again)
        assert set(counts) <= {"3"}, again  # expert slots, whose shapes follow from the weights


@pytest.mark.parametrize("niced", [True, False])
def test_spares_are_taken_once_all_of_their_runtime_are_ready(niced) -> None:
    """While a worker starts, others go on slowly or end."""
    spares = Spares(["python", "-u", "-m", __name__], {}, {"ffn": [([], {})] * 2}, niced)
    ends = []
    for _ in range(2):
        own, theirs = socket.socketpair()
        own.setblocking(False)
        child = subprocess.Popen(["sleep", "60"])
        spares._waiting["ffn"].append(Spare(child, own, [], {}, 0))
        ends.append(theirs)
    ends[0].send(READY)
    assert spares.take("ffn", 2) == []
    both = spares._waiting["ffn"].copy()
    spares.hold()
    assert [spare.child.poll() is None for spare in both] == [niced] * 2
    if niced:
        ends[1].send(READY)
        assert spares.take("ffn", 2) == both
        spares._waiting["ffn"] = both
        both[1].child.kill()
        both[1].child.wait()
        assert spares.take("ffn", 2) == []
    spares.close()
    assert spares.take("ffn", 2) == []
    for end in ends:
        end.close()


def main() -> None:
    how = "warm" if "jax" in sys.modules else "cold"
    print(f"pid {os.getpid()} {how}, {sys.orig_argv[3]} {sys.argv[-1]}")
    tell_ready()
    time.sleep(120)


if __name__ == "__main__":
    main()
