"""Which follower is to blame, decided from literal states."""

from types import SimpleNamespace
from typing import Any

from jaxserve.config.sections import Cluster
from jaxserve.fleet.control import FollowerState
from jaxserve.fleet.follower_session import SETTLE_SECONDS, FollowerSession, find_failure
from tests.jaxserve.fleet.ends import identity

CLUSTER = Cluster(start_seconds=100, step_seconds=30, heartbeat_seconds=5)
CHANNEL: Any = SimpleNamespace(allow=lambda *seconds: None, shutdown=lambda: None)
LEADER: Any = SimpleNamespace(cluster=CLUSTER, identity=identity(0, 4))


def follower(
    process: int, *, error: str = "", ready: bool = True, completed: int = -1, **changes: object
) -> FollowerSession:
    session = FollowerSession(LEADER, CHANNEL)
    session.identity = identity(process, 4)
    session.state = FollowerState(completed, ready, error=error)
    for name, value in changes.items():
        setattr(session, name, value)
    return session


def blame(*followers: FollowerSession, now: float = 10.0, last: int = -1, error: str = "") -> str:
    return find_failure(followers, now, last=last, cluster=CLUSTER, step_error=error)


def well(process: int) -> FollowerSession:
    return follower(process)


def test_all_well() -> None:
    assert blame(well(1), well(2), well(3)) == ""


def test_a_lost_connection_is_named_at_once_and_before_reported_errors() -> None:
    reported = follower(1, error="recv failed", error_at=2.0)
    lost = follower(2, lost="the connection closed")
    expected = "process 2 (ffn, host host2, pid 1002): the connection closed; no step seen yet"
    assert blame(reported, lost, well(3)) == expected


def test_a_process_that_reported_and_then_left_is_not_lost() -> None:
    reported = follower(1, error="recv failed", error_at=9.5)
    reported.lost = "the connection closed"
    assert blame(reported, well(2)) == ""
    assert "recv failed" in blame(reported, well(2), now=9.5 + SETTLE_SECONDS)


def test_reported_errors_settle_and_then_all_are_named_the_first_first() -> None:
    first = follower(2, error="recv failed", error_at=8.0)
    second = follower(1, error="gloo closed", error_at=8.5)
    assert blame(first, second, now=8.9) == ""
    named = blame(second, first, now=9.0)
    assert named.index("process 2") < named.index("process 1")
    assert blame(first, now=9.0, error="step 3: no memory").startswith("step 3: no memory; proc")


def test_a_suspect_is_named_once_and_when_it_is_well_again() -> None:
    state = follower(2, silent=1.4)
    assert state.doubt(1.5) == ""
    state.silent = 1.6
    assert "process 2" in (said := state.doubt(1.5))
    assert "suspect, silent for 1.6 s; no step seen yet" in said
    assert state.doubt(1.5) == ""
    state.silent = 0.1
    assert state.doubt(1.5).endswith("well again")
    assert follower(1, ready=False, silent=50.0).doubt(1.5) == "", "it loads"


def test_before_ready_silence_may_last_for_start_seconds() -> None:
    limits = []
    for ready in (False, True):
        session = follower(1, ready=ready, name="process 1")
        limits.append(session._limit())
    assert limits == [100.0, 10.0]


def test_all_that_are_late_are_named() -> None:
    late = [follower(process, advanced_at=0.0) for process in (1, 2)]
    named = blame(*late, now=40.0, last=0)
    assert named.count("boundary 0 not done after 40.0 s") == 2
    assert blame(*late, now=40.0, last=-1) == ""  # nothing was asked of them
    assert blame(*late, now=45.0, last=0) == ""  # their time begins when something is
    slow = follower(1, advanced_at=15.0, completed=5)
    assert blame(slow, now=40.0, last=9) == ""  # each step has a time of its own


def test_what_a_follower_says_is_booked() -> None:
    session, place = follower(1), "ffn of lane 0, layer 1, step 2"
    session.update(FollowerState(3, True, place, 7), 10.0)
    assert (session.advanced_at, session.error_at) == (10.0, 0.0)
    session.update(FollowerState(3, True, place, 7, error="first"), 11.0)
    session.update(FollowerState(3, True, place, 7, error="first", leaving=True), 12.0)
    assert session.describe().endswith(f"first; last seen in {place}")
    assert (session.advanced_at, session.error_at) == (10.0, 11.0)
