"""Real processes joined by `jax.distributed`: what everybody says, and when, if one is gone."""

import os
import re
import signal
import time

import pytest

from tests.jaxserve.fleet.launched import MODULE, Launched, launched

pytestmark = pytest.mark.multihost

LAYOUT = ("--jax", "--set", "attention.dp=2", "--set", "ffn.ep=3")
THREE = (
    *("--jax", "--processes", "3", "--collective"),
    *("--set", "attention.dp=1", "--set", "ffn.ep=2"),
)
"""All three are in one collective, whose survivors report that it broke."""
TWO_HOSTS = (
    *("--processes", "4", "--hosts-of", "2"),
    *("--set", "attention.dp=2", "--set", "ffn.ep=2"),
)
"""Process 2 hands on to 3, which is on its host."""
SLACK = 10.0
"""Seconds that a busy machine may add to a deadline."""


def no_abort(run: Launched, process: int) -> None:
    """JAX has not shot this process, or this process was faster."""
    assert not re.search(rf"process {process} ended with signal", run.output), run.output


def test_unequal_device_counts_exchange_arrays_and_leave_in_order():
    with launched(*LAYOUT, "--boundaries", "100") as run:
        assert run.end() == 0, run.output
        assert "[0] devices 2 of 5" in run.output
        assert "[1] devices 3 of 5" in run.output
        assert "[0] boundary 99 value 100" in run.output
        assert "[1] leaving" in run.output
        assert "Check failure" not in run.output


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("arguments", "stops"),
    [
        ((*LAYOUT, "--cut-off", "--boundaries", "1"), False),  # with a transfer on its way
        (LAYOUT, True),
        ((*TWO_HOSTS, "--boundaries", "100"), False),  # what relays hand on is carried out
    ],
    ids=["cut off", "SIGTERM", "relays"],
)
def test_all_leave_in_order(arguments, stops):
    with launched(*arguments) as run:
        if stops:
            run.wait_for(r"^\[0\] boundary 49 ")
            run.process.send_signal(signal.SIGTERM)
        assert run.end() == 0, run.output
        for process in range(4 if "--processes" in arguments else 2):
            assert f"[{process}] leaving" in run.output


CLOSED, SILENT = r"the connection closed \([^)]*\)", r"silent for \d+\.\d s"
PLACE = r"; last seen in ffn of lane 0, layer 3, step \d+$"


@pytest.mark.parametrize(
    ("arguments", "victim", "sent", "said"),
    [
        pytest.param(arguments, victim, sent, said, id=name, marks=marks)
        for name, arguments, victim, sent, said, marks in (
            ("follower killed", LAYOUT, 1, signal.SIGKILL, CLOSED + PLACE, ()),
            ("follower stopped", LAYOUT, 1, signal.SIGSTOP, SILENT + PLACE, pytest.mark.nightly),
            ("one of three", THREE, 2, signal.SIGKILL, CLOSED, pytest.mark.nightly),
            ("relay killed", TWO_HOSTS, 2, signal.SIGKILL, CLOSED, pytest.mark.nightly),
            ("relay stopped", TWO_HOSTS, 2, signal.SIGSTOP, SILENT, pytest.mark.nightly),
        )
    ],
)
def test_a_lost_follower_is_named_and_not_who_noticed_first(arguments, victim, sent, said):
    with launched(*arguments, followers_end_in=0.5) as run:
        run.wait_for(r"^\[0\] boundary 49 ")
        pid = run.pid(victim)
        os.kill(pid, sent)
        started = time.monotonic()
        told = run.wait_for(r"^\[0\] CRITICAL failed: (.*)$")[1]
        # Silence is noticed after two heartbeats' limits.
        assert time.monotonic() - started < 2.0 * (sent == signal.SIGSTOP) + SLACK
        assert re.match(rf"process {victim} \(.*, host .*, pid {pid}\): {said}", told), told
        for other in {1, 2, 3} - {victim}:
            assert f"process {other}" not in told
        assert run.end() == 1, run.output
        no_abort(run, 0)


@pytest.mark.nightly
def test_leader_outlives_the_heartbeats_of_jax():
    """JAX's default is to abort the leader as soon as it misses the follower."""
    after = "9"  # JAX waits for 6 s: no less than 6 heartbeats of ours
    with launched(*LAYOUT, "--jax-heartbeat", "1", "--report-after", after) as run:
        run.wait_for(r"^\[0\] boundary 49 ")
        os.kill(run.pid(1), signal.SIGKILL)
        assert run.end() == 1, run.output
        assert "[0] CRITICAL failed: process 1" in run.output
        no_abort(run, 0)


@pytest.mark.parametrize(
    "sent", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.nightly)]
)
def test_follower_says_that_the_leader_is_gone(sent):
    """Also when it takes longer to say so than JAX takes to abort it."""
    with launched(*LAYOUT, "--report-after", "2") as run:
        run.wait_for(r"^\[0\] boundary 99 ")
        pid = run.pid(0)
        os.kill(pid, sent)
        started = time.monotonic()
        leader = rf"the leader \(process 0 \(attention, host .*, pid {pid}\), 127.0.0.1:\d+\)"
        said = CLOSED if sent == signal.SIGKILL else SILENT
        run.wait_for(rf"^\[1\] CRITICAL failed: {leader}: {said}")
        assert time.monotonic() - started < 2.0 + SLACK
        run.wait_for("process 1 ended with exit code 1")
        if sent == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
        assert run.end() == (1 if sent == signal.SIGSTOP else 128 + sent), run.output
        no_abort(run, 1)


@pytest.mark.nightly
def test_missing_peer_is_an_error_not_an_abort():
    """Without the control plane before it, JAX would abort both kinds of process. Here the two are
    on ports of their own, and do not find each other."""
    alone = []
    for process, coordinator, control, expected in (
        ("0", 47111, 47112, r"CRITICAL process 1 \(ffn\): did not register within 1 s"),
        ("1", 47113, 47114, r"CRITICAL process 1 .*: the leader .* did not answer within 1 s"),
    ):
        environment = {
            "JAX_PLATFORMS": "cpu",
            "JAXSERVE_PROCESS_ID": process,
            "JAXSERVE_PROCESSES": "2",
            "JAXSERVE_COORDINATOR": f"127.0.0.1:{coordinator}",
            "JAXSERVE_CONTROL": f"127.0.0.1:{control}",
            "JAXSERVE_CLUSTER_TOKEN": "t" * 16,
        }
        run = Launched(["-m", MODULE, *LAYOUT, "--set", "cluster.start_seconds=1"], environment)
        alone.append((run, expected))
    for run, expected in alone:
        assert run.end() == 1, run.output
        run.wait_for(expected, 5.0)


@pytest.mark.nightly
def test_devices_that_are_not_the_share_are_refused():
    """1A1F on hosts of four devices: the second process would be left with nothing, silently."""
    with launched("--jax", "--own-devices", "4") as run:
        assert run.end() in (1, 2), run.output
        for process in (0, 1):  # each for itself, or because the other one told it
            run.wait_for(
                rf"^\[{process}\] CRITICAL .*process [01] has 4 devices, and its share of the "
                r"layout is 1 \((1 attention \+ 0 ffn|0 attention \+ 1 ffn)\)",
                1.0,
            )
