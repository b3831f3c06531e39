"""The local launcher with processes that need no `jax.distributed`."""

import os
import re
import signal

import pytest

from jaxserve.launch.local.__main__ import main
from tests.jaxserve.fleet.launched import launched

pytestmark = pytest.mark.multihost


def test_prefixes_pins_and_exits_like_the_leader() -> None:
    with launched("--pin", "--boundaries", "50") as run:
        assert run.end() == 0, run.output
        assert "[0] boundary 49 value 49" in run.output
        assert "[1] leaving" in run.output
        cores = sorted(os.sched_getaffinity(0))
        pinned = re.findall(r"^\[(\d)\] pid \d+ cores \[(\d+)\]$", run.output, re.MULTILINE)
        assert sorted(pinned) == [("0", str(cores[0])), ("1", str(cores[1 % len(cores)]))]


def test_refused_follower_ends_everything() -> None:
    with launched("--follower-set", "ffn.ep=2", "--grace", "1") as run:
        assert run.end() == 1
        assert re.search(
            r"\[1\] CRITICAL process 1 .* refused by the leader .*: process 1 .* is configured "
            r"differently from process 0 .*: ffn.ep = 2, here 1",
            run.output,
        ), run.output


@pytest.mark.nightly
def test_leader_that_does_not_end_is_ended_after_the_grace() -> None:
    with launched("--grace", "1") as run:
        run.wait_for(r"^\[0\] boundary 49 ")
        os.kill(run.pid(0), signal.SIGSTOP)
        os.kill(run.pid(1), signal.SIGKILL)
        run.wait_for("still there: process 0; ending what is left")
        assert run.end() == 1, run.output


@pytest.mark.nightly
def test_three_signals_end_everything_at_once() -> None:
    with launched() as run:
        run.wait_for(r"^\[0\] boundary 49 ")
        os.kill(run.pid(0), signal.SIGSTOP)
        for sent in range(1, 3):
            run.process.send_signal(signal.SIGINT)
            run.wait_for(rf"(?s)(SIGINT: telling process 0.*){{{sent}}}")
        run.process.send_signal(signal.SIGINT)
        run.wait_for("ending everything")
        assert run.end() == 1, run.output


@pytest.mark.parametrize("option", ["--processes 0", "--restart-seconds nan", "--grace -1"])
def test_bad_arguments_are_named(option, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(option.split())
    assert f"{option}: expected" in capsys.readouterr().err
