"""Real processes joined by `jax.distributed`: what everybody says, and when, if one is gone."""

import os
import re
import signal
import time

import pytest

from tests.jaxserve.fleet.launched import MODULE, Launched, launched

pytestmark = pytest.mark.multihost

LAYOUT = ("--jax", "--set", "attention.dp=2", "--set", "ffn.ep=3")
SLACK = 10.0
"""Seconds that a busy machine may add to a deadline."""


def no_abort(run: Launched, process: int) -> None:
    """JAX has not shot this process, or this process was faster."""
    assert not re.search(rf"process {process} ended with signal", run.output), run.output


def test_unequal_device_counts_exchange_arrays_and_leave_in_order() -> None:
    with launched(*LAYOUT, "--boundaries", "100") as run:
        assert run.end() == 0, run.output
        assert "[0] devices 2 of 5" in run.output
        assert "[1] devices 3 of 5" in run.output
        assert "[0] boundary 99 value 100" in run.output
        assert "[1] leaving" in run.output
        assert "Check failure" not in run.output


def test_step_that_was_cut_off_does_not_spoil_the_end() -> None:
    with launched(*LAYOUT, "--cut-off", "--boundaries", "1") as run:
        assert run.end() == 0, run.output
        assert "[1] leaving" in run.output


def test_sigterm_ends_all_in_order() -> None:
    with launched(*LAYOUT) as run:
        run.wait_for(r"^\[0\] boundary 49 ")
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 0, run.output
        assert "[0] leaving" in run.output
        assert "[1] leaving" in run.output


def test_killed_follower_is_named_and_the_leader_exits_in_order() -> None:
    with launched(*LAYOUT) as run:
        run.wait_for(r"^\[0\] boundary 99 ")
        pid = run.pid(1)
        os.kill(pid, signal.SIGKILL)
        started = time.monotonic()
        run.wait_for(
            rf"^\[0\] CRITICAL failed: process 1 \(ffn, host .*, pid {pid}\): its connection "
            r"closed; last seen in ffn of lane 0, layer 3, step \d+$"
        )
        assert time.monotonic() - started < SLACK
        assert run.end() == 1, run.output
        assert "process 1 ended with signal SIGKILL" in run.output
        no_abort(run, 0)


def test_leader_outlives_the_heartbeats_of_jax() -> None:
    """By default JAX aborts it as soon as it misses the follower, clients or not."""
    after = "9"  # JAX waits for 6 s: no less than 6 heartbeats of ours
    with launched(*LAYOUT, "--jax-heartbeat", "1", "--report-after", after) as run:
        run.wait_for(r"^\[0\] boundary 49 ")
        os.kill(run.pid(1), signal.SIGKILL)
        assert run.end() == 1, run.output
        assert "[0] CRITICAL failed: process 1" in run.output
        no_abort(run, 0)


def test_stopped_follower_is_named_within_its_deadline() -> None:
    with launched(*LAYOUT, followers_end_in=0.5) as run:
        run.wait_for(r"^\[0\] boundary 99 ")
        pid = run.pid(1)
        os.kill(pid, signal.SIGSTOP)
        started = time.monotonic()
        said = run.wait_for(
            rf"^\[0\] CRITICAL failed: process 1 \(ffn, host .*, pid {pid}\): no heartbeat for "
            r"(\d+\.\d) s; last seen in ffn of lane 0, layer 3, step \d+$"
        )
        assert 2.0 <= float(said[1]) < 2.0 + SLACK
        assert time.monotonic() - started < 2.0 + SLACK
        assert run.end() == 1, run.output
        no_abort(run, 0)


def test_follower_says_that_the_leader_was_killed() -> None:
    """Also when it takes longer to say so than JAX takes to abort it."""
    with launched(*LAYOUT, "--report-after", "2") as run:
        run.wait_for(r"^\[0\] boundary 99 ")
        pid = run.pid(0)
        os.kill(pid, signal.SIGKILL)
        started = time.monotonic()
        run.wait_for(
            rf"^\[1\] CRITICAL failed: the leader \(process 0 \(attention, host .*, pid {pid}\), "
            r"127.0.0.1:\d+\): its connection closed"
        )
        assert time.monotonic() - started < SLACK
        assert run.end() == 128 + signal.SIGKILL, run.output
        assert "process 1 ended with exit code 1" in run.output
        no_abort(run, 1)


def test_follower_says_that_the_leader_is_silent() -> None:
    with launched(*LAYOUT) as run:
        run.wait_for(r"^\[0\] boundary 99 ")
        os.kill(run.pid(0), signal.SIGSTOP)
        started = time.monotonic()
        run.wait_for(r"^\[1\] CRITICAL failed: the leader \(process 0 .*: no heartbeat for 2\.\d s")
        assert time.monotonic() - started < 2.0 + SLACK
        run.wait_for("process 1 ended with exit code 1")
        os.kill(run.pid(0), signal.SIGCONT)
        assert run.end() == 1, run.output
        no_abort(run, 0)


def test_missing_peer_is_an_error_not_an_abort() -> None:
    """Without the control plane before it, JAX would abort both kinds of process. Here the two are
    on ports of their own, and do not find each other."""
    alone = []
    for process, coordinator, control, expected in (
        ("0", 47111, 47112, r"CRITICAL process 1: did not register within 1 s"),
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


def test_the_killed_one_of_three_is_named_and_not_who_noticed_first() -> None:
    """All three are in one collective, whose survivors report that it broke."""
    layout = ("--processes", "3", "--collective", "--set", "attention.dp=1", "--set", "ffn.ep=2")
    with launched("--jax", *layout) as run:
        run.wait_for(r"^\[0\] boundary 49 ")
        pid = run.pid(2)
        os.kill(pid, signal.SIGKILL)
        said = run.wait_for(r"^\[0\] CRITICAL failed: (.*)$")[1]
        assert re.match(rf"process 2 \(ffn, host .*, pid {pid}\): its connection closed", said)
        assert "process 1" not in said
        assert run.end() == 1, run.output


TWO_HOSTS = (
    *("--processes", "4", "--hosts-of", "2"),
    *("--set", "attention.dp=2", "--set", "ffn.ep=2"),
)


def test_a_killed_relay_is_named_and_not_who_hears_nothing_more() -> None:
    """Process 2 hands on to 3, which is on its host."""
    with launched(*TWO_HOSTS) as run:
        run.wait_for(r"^\[0\] boundary 49 ")
        pid = run.pid(2)
        os.kill(pid, signal.SIGKILL)
        started = time.monotonic()
        said = run.wait_for(r"^\[0\] CRITICAL failed: (.*)$")[1]
        assert time.monotonic() - started < SLACK
        assert re.match(rf"process 2 \(.*, host host1, pid {pid}\): its connection closed", said)
        assert "process 3" not in said
        run.wait_for(r"^\[3\] CRITICAL failed: ")
        assert run.end() == 1, run.output


def test_a_stopped_relay_is_named_within_its_deadline() -> None:
    with launched(*TWO_HOSTS, followers_end_in=0.5) as run:
        run.wait_for(r"^\[0\] boundary 49 ")
        pid = run.pid(2)
        os.kill(pid, signal.SIGSTOP)
        started = time.monotonic()
        said = run.wait_for(r"^\[0\] CRITICAL failed: (.*)$")[1]
        assert time.monotonic() - started < 2.0 + SLACK
        assert re.match(rf"process 2 \(.*, host host1, pid {pid}\): no heartbeat for ", said)
        assert "process 3" not in said
        assert run.end() == 1, run.output


def test_what_relays_hand_on_is_carried_out_to_the_end() -> None:
    with launched(*TWO_HOSTS, "--boundaries", "100") as run:
        assert run.end() == 0, run.output
        for process in range(4):
            assert f"[{process}] leaving" in run.output


def test_devices_that_are_not_the_share_are_refused() -> None:
    """1A1F on hosts of four devices: the second process would be left with nothing, silently."""
    with launched("--jax", "--own-devices", "4") as run:
        assert run.end() in (1, 2), run.output
        for process in (0, 1):  # each for itself, or because the other one told it
            run.wait_for(
                rf"^\[{process}\] CRITICAL .*process [01] has 4 devices, and its share of the "
                r"layout is 1 \((1 attention \+ 0 ffn|0 attention \+ 1 ffn)\)",
                1.0,
            )
