import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from jaxserve.config.sections import Cluster
from jaxserve.errors import EngineFailedError
from jaxserve.fleet.control import Boundary, Shutdown
from jaxserve.fleet.follower import Follower
from jaxserve.link.session.messages import encode
from tests.jaxserve.fleet.ends import SHORT, TOKEN, Ends, boundary, identity, pair

WAIT = 10.0


def test_no_leader_is_an_error_within_the_deadline() -> None:
    cluster = Cluster(start_seconds=0.5)
    follower = Follower(identity(1), address="127.0.0.1:1", token=TOKEN, cluster=cluster)
    started = time.monotonic()
    expected = r"process 1 .*the leader \(process 0, 127.0.0.1:1\) did not answer within 0.5 s "
    reason = r"\(127.0.0.1:1 cannot be reached: .*Connection refused\)"
    with pytest.raises(EngineFailedError, match=expected + reason):
        follower.register()
    assert time.monotonic() - started < 5


def test_follower_may_come_first() -> None:
    with Ends() as ends:
        late = ends.leader()  # only for its address
        address = late.address
        late.close(timeout=0.1)
        follower = Follower(identity(1), address=address, token=TOKEN, cluster=SHORT)
        ends.callback(follower.close)
        with ThreadPoolExecutor(1) as pool:
            registered = pool.submit(follower.register)
            time.sleep(0.3)  # it has tried by then
            leader = ends.leader(address=address)
            leader.wait_registered()
            registered.result(WAIT)


def test_idle_leader_is_waited_for() -> None:
    with pair() as (ends, leader, follower):
        received = follower.boundaries()
        # One and a half times the limit of silence.
        threading.Timer(1.5, leader.broadcast, [boundary(0)]).start()
        assert next(received) == boundary(0)
        assert ends.follower_failures.empty()


def test_shutdown_ends_the_boundaries_after_the_last_one() -> None:
    with pair() as (ends, leader, follower):
        leader.broadcast(boundary(0))
        closing = threading.Thread(target=leader.close)
        closing.start()
        time.sleep(0.1)
        assert list(follower.boundaries()) == [boundary(0)]
        follower.close()
        closing.join(WAIT)
        assert leader.close()
        assert ends.failures.empty()
        assert ends.follower_failures.empty()


def test_a_follower_has_time_to_finish_after_the_shutdown() -> None:
    with pair() as (ends, leader, follower):
        results: list[bool] = []
        closing = threading.Thread(target=lambda: results.append(leader.close(timeout=WAIT)))
        closing.start()
        assert list(follower.boundaries()) == []
        time.sleep(1.2)  # longer than the limit of silence, which goes on being kept
        assert ends.follower_failures.empty()
        follower.close()
        closing.join(WAIT)
        assert results == [True]


def test_leader_does_not_wait_for_ever_and_the_late_follower_fails() -> None:
    with pair() as (ends, leader, _):
        started = time.monotonic()
        assert not leader.close(timeout=0.2)
        assert time.monotonic() - started < 5
        failure = str(ends.follower_failures.get(timeout=WAIT))
        assert "the connection closed" in failure


def test_failed_end_raises_with_the_reason() -> None:
    with pair() as (ends, leader, follower):
        leader.broadcast(boundary(0))
        leader.close(failure="out of memory", timeout=0.1)
        expected = r"the leader \(process 0 .*\) ended the deployment: out of memory"
        failure = ends.follower_failures.get(timeout=WAIT)
        with pytest.raises(EngineFailedError, match=expected):
            list(follower.boundaries())
        assert follower.failure is failure
        assert ends.follower_failures.empty()


@pytest.mark.parametrize(
    ("failure", "why"), [("no such tensor", "no such tensor"), ("", "before it was ready")]
)
def test_leader_that_ends_during_the_start_is_not_waited_for(failure: str, why: str) -> None:
    with Ends() as ends:
        leader = ends.leader()
        follower = ends.follower(leader)
        follower.register()
        threading.Timer(0.2, leader.close, kwargs={"failure": failure, "timeout": 1.0}).start()
        with pytest.raises(EngineFailedError, match=f"ended the deployment: {why}"):
            follower.wait_warm_up()


def test_vanished_leader_raises_at_once() -> None:
    with pair() as (ends, leader, follower):
        leader._listener.close(0.1)
        failure = ends.follower_failures.get(timeout=WAIT)
        name = f"the leader (process 0 (attention, host host0, pid 1000), {leader.address})"
        assert str(failure).startswith(f"{name}: the connection closed")
        with pytest.raises(EngineFailedError):
            next(follower.boundaries())


def test_silent_leader_raises_within_the_deadline() -> None:
    with Ends() as ends:
        leader = ends.leader(cluster=msgspec.structs.replace(SHORT, heartbeat_seconds=1000))
        follower = ends.follower(leader)
        follower.register()
        leader._followers[1].post = lambda body: None
        follower.ready()
        started = time.monotonic()
        with pytest.raises(EngineFailedError, match=r"the leader .*: silent for 1\.\d s"):
            next(follower.boundaries())
        assert time.monotonic() - started < 1.0 + 0.25 + 2.0


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (boundary(2), f"boundary 2 with shapes digest {boundary(2).digest} came, where 1 with"),
        (boundary(0), f"boundary 0 with shapes digest {boundary(0).digest} came, where 1 with"),
        (
            Boundary(1, boundary(1).plans, "0123"),
            f"digest 0123 came, where 1 with {boundary(1).digest} is next",
        ),
    ],
)
def test_boundary_that_does_not_fit_is_named_on_both_sides(bad: Boundary, expected: str) -> None:
    with pair() as (ends, leader, follower):
        leader.broadcast(boundary(0))
        leader._broadcast(bad)
        assert expected in str(ends.follower_failures.get(timeout=WAIT))
        assert expected in str(ends.failures.get(timeout=WAIT))
        with pytest.raises(EngineFailedError, match=expected):
            list(follower.boundaries())


def test_unknown_message_is_a_failure() -> None:
    with pair() as (ends, leader, _):
        leader._followers[1].post(b"\xc1")
        assert "MessagePack data is malformed" in str(ends.follower_failures.get(timeout=WAIT))


def test_position_that_raises_does_not_stop_the_heartbeat() -> None:
    with pair() as (ends, _, follower):
        follower.position = [].pop
        time.sleep(1.2)  # longer than the limit of silence
        assert ends.failures.empty()


def test_close_may_be_called_from_the_failure_callback() -> None:
    with Ends() as ends:
        leader = ends.leader()
        done = threading.Event()

        def end(error: EngineFailedError) -> None:
            follower.close()
            done.set()

        follower = Follower(
            identity(1), address=leader.address, token=TOKEN, cluster=SHORT, on_failure=end
        )
        follower.register()
        leader._followers[1].post(encode(Shutdown("gone")))
        assert done.wait(WAIT)
