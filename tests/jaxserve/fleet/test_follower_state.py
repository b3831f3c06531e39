"""Which follower is to blame, decided from literal states."""

import pytest

from jaxserve.config.deployment import Cluster
from jaxserve.fleet.control import Failure, Heartbeat, Leaving, Position
from jaxserve.fleet.follower_state import SETTLE_SECONDS, FollowerState, find_failure
from tests.jaxserve.fleet.ends import identity

CLUSTER = Cluster(start_seconds=100, step_seconds=30, heartbeat_seconds=5)


def follower(process: int, *, now: float = 0.0, **changes: object) -> FollowerState:
    state = FollowerState(identity(process, 4), now)
    state.ready = True
    for name, value in changes.items():
        setattr(state, name, value)
    return state


def blame(*followers: FollowerState, now: float = 10.0, last: int = -1, error: str = "") -> str:
    return find_failure(followers, now, last=last, cluster=CLUSTER, step_error=error)


def well(process: int, now: float = 10.0) -> FollowerState:
    return follower(process, message_at=now)


def test_all_well() -> None:
    assert blame(well(1), well(2), well(3)) == ""


def test_a_lost_connection_is_named_at_once_and_before_reported_errors() -> None:
    reported = follower(1, message_at=10.0, error="recv failed", error_at=2.0)
    lost = follower(2, message_at=10.0, lost="its connection closed", closed=True)
    expected = "process 2 (ffn, host host2, pid 1002): its connection closed; no step seen yet"
    assert blame(reported, lost, well(3)) == expected


def test_a_process_that_reported_and_then_left_is_not_lost() -> None:
    reported = follower(1, message_at=10.0, error="recv failed", error_at=9.5, closed=True)
    reported.lost = "its connection closed"
    assert blame(reported, well(2)) == ""
    assert "recv failed" in blame(reported, well(2), now=9.5 + SETTLE_SECONDS)


def test_reported_errors_settle_and_then_all_are_named_the_first_first() -> None:
    first = follower(2, message_at=9.0, error="recv failed", error_at=8.0)
    second = follower(1, message_at=9.0, error="gloo closed", error_at=8.5)
    assert blame(first, second, now=8.9) == ""
    named = blame(second, first, now=9.0)
    assert named.index("process 2") < named.index("process 1")
    assert blame(first, now=9.0, error="step 3: no memory").startswith("step 3: no memory; proc")


def test_silence_is_named_before_the_step_that_waits_for_it() -> None:
    silent = follower(2, message_at=5.0, advanced_at=0.0)
    waiting = follower(1, message_at=45.0, advanced_at=0.0)
    assert blame(waiting, silent, now=45.0, last=3).startswith("process 2")
    assert "no heartbeat for 40.0 s" in blame(waiting, silent, now=45.0, last=3)


def test_a_suspect_is_named_once_and_when_it_is_well_again() -> None:
    state = follower(2, message_at=5.0)
    assert state.doubt(6.4, 1.5) == ""
    assert "process 2" in (said := state.doubt(6.6, 1.5))
    assert "suspect, no heartbeat for 1.6 s; no step seen yet" in said
    assert state.doubt(6.8, 1.5) == ""
    state.message_at = 6.9
    assert state.doubt(7.0, 1.5).endswith("well again")
    assert follower(1, ready=False).doubt(50.0, 1.5) == "", "it loads"


def test_before_ready_silence_may_last_for_start_seconds() -> None:
    assert blame(follower(1, ready=False), now=99.0) == ""
    assert "no heartbeat for 101.0 s" in blame(follower(1, ready=False), now=101.0)


def test_all_that_are_late_are_named() -> None:
    late = [follower(process, message_at=40.0, advanced_at=0.0) for process in (1, 2)]
    named = blame(*late, now=40.0, last=0)
    assert named.count("boundary 0 not done after 40.0 s") == 2
    assert blame(*late, now=40.0, last=-1) == ""  # nothing was asked of them
    assert blame(*late, now=45.0, last=0) == ""  # their time begins when something is
    slow = follower(1, message_at=40.0, advanced_at=15.0, completed=5)
    assert blame(slow, now=40.0, last=9) == ""  # each step has a time of its own


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (Heartbeat(3, True, Position("ffn", 0, 1, 2), 7), ("3", "True", "7", "10.0")),
        (Heartbeat(-1, False, None, 8), ("-1", "False", "8", "0.0")),
    ],
)
def test_heartbeats_are_booked(message: Heartbeat, expected: tuple[str, ...]) -> None:
    state = FollowerState(identity(1), 0.0)
    state.received(message, 10.0)
    found = (state.completed, state.ready, state.progress, state.advanced_at)
    assert tuple(map(str, found)) == expected
    assert state.message_at == 10.0


def test_the_first_error_counts() -> None:
    state = FollowerState(identity(1), 0.0)
    state.received(Failure("first", Position("ffn", 0, 1, 2)), 1.0)
    state.received(Failure("second"), 2.0)
    state.received(Leaving(), 3.0)
    assert state.describe().endswith("first; last seen in ffn of lane 0, layer 1, step 2")
    assert (state.error_at, state.leaving) == (1.0, True)
