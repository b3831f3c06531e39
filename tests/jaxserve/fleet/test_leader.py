import contextlib
import queue
import re
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from jaxserve.config.sections import Cluster
from jaxserve.errors import ConfigError, EngineFailedError
from jaxserve.fleet.follower import Follower
from jaxserve.fleet.leader import HOSTS_EACH, Leader, parent_of
from jaxserve.link.session.channel import Channel, dial
from tests import golden
from tests.jaxserve.fleet.ends import SHORT, TOKEN, Ends, boundary, identity, pair
from tests.jaxserve.waiting import until

WAIT = 10.0


def test_needs_a_token_and_a_port():
    with pytest.raises(ConfigError, match="cluster token: empty"):
        Leader(identity(0), address="x:1", token="", cluster=SHORT, on_failure=print)
    with Ends() as ends:
        first = ends.leader()
        second = Leader(
            identity(0), address=first.address, token=TOKEN, cluster=SHORT, on_failure=print
        )
        with pytest.raises(ConfigError, match=f"control address {first.address}: cannot listen"):
            second.start()


def test_stranger_without_the_token_is_refused():
    with Ends() as ends:
        leader = ends.leader()
        stranger = ends.follower(leader, token="guess")
        with pytest.raises(ConfigError, match=r"process 1 .*refused.*another token than that"):
            stranger.register()
        # Anything but a registration is refused, too.
        channel = dial(leader.address, TOKEN, WAIT)
        channel.send(b"??")
        with pytest.raises((EOFError, OSError)):
            channel.receive()
        channel.close()


def test_other_deployment_is_refused_and_named():
    with Ends() as ends:
        leader = ends.leader(cluster=msgspec.structs.replace(SHORT, start_seconds=1.0))
        follower = ends.follower(leader, digest="d2", facts={"lanes": "3", "attention.dp": "1"})
        difference = r"process 1 .*differently from process 0 .*: lanes = 3, here 2"
        with pytest.raises(ConfigError, match=difference):
            follower.register()
        expected = "process 1: did not register within 1 s of the last progress; "
        expected += f"refused: {difference}"
        with pytest.raises(EngineFailedError, match=expected):
            leader.wait_registered()


def test_process_id_is_taken_once():
    with Ends() as ends:
        leader = ends.leader()
        ends.joined(leader)
        with pytest.raises(ConfigError, match="process id 1 is taken by process 1"):
            ends.follower(leader).register()


def test_missing_followers_are_named():
    with Ends() as ends:
        leader = ends.leader(4, msgspec.structs.replace(SHORT, start_seconds=0.1))
        ends.joined(leader, 2)
        expected = "process 1, process 3: did not register within 0.1 s"
        with pytest.raises(EngineFailedError, match=expected):
            leader.wait_registered()


def test_the_meeting_waits_while_processes_come(monkeypatch, caplog):
    monkeypatch.setattr("jaxserve.fleet.leader.TELL_SECONDS", 0.0)
    caplog.set_level("INFO")
    with Ends() as ends:
        cluster = msgspec.structs.replace(SHORT, start_seconds=0.8)
        leader = ends.leader(3, cluster, roles=("attention", "ffn", "ffn"))
        followers = [ends.follower(leader, process_id) for process_id in (1, 2)]
        for follower, seconds in zip(followers, (0.6, 1.2), strict=True):  # the second after 0.8
            threading.Timer(seconds, follower.register).start()
        leader.wait_registered()
        for follower in followers:
            follower.wait_registered()
    assert "waiting for process 1 (ffn), process 2 (ffn) to register, 0 s" in caplog.text
    assert "waiting for process 2 (ffn) to register, 1 s" in caplog.text


def test_a_follower_that_cannot_reach_the_broadcast_names_the_port():
    with Ends() as ends:
        leader = ends.leader(processes=3)
        ends.joined(leader)
        leader._followers[1].address = "127.0.0.1:1"
        follower = ends.follower(leader, 2, host="host1")
        relay = r"process 1 \(ffn, host host1, pid 1001\)"
        expected = f"registered but cannot reach 127.0.0.1:1, where {relay} hands on the plans: "
        with pytest.raises(EngineFailedError, match=expected):
            follower.register()
        threading.Thread(target=follower.fail, args=[expected.replace("\\", "")]).start()
        with pytest.raises(EngineFailedError, match=rf"^process 2 \(ffn, .*\): {expected}"):
            leader.wait_registered()


def test_nobody_warms_up_before_all_have_compiled():
    with Ends() as ends:
        leader = ends.leader(3, msgspec.structs.replace(SHORT, start_seconds=0.5))
        followers = [ends.follower(leader, process_id) for process_id in (1, 2)]
        waits = [threading.Thread(target=follower.wait_warm_up) for follower in followers]
        for follower in followers:
            follower.register()
        waits[0].start()
        with pytest.raises(EngineFailedError, match=r"^process 2 .*: did not compile within 0.5 s"):
            leader.begin_warm_up()
        leader.cluster = SHORT
        assert waits[0].is_alive()
        waits[1].start()
        leader.begin_warm_up()
        for wait in waits:
            wait.join(WAIT)
            assert not wait.is_alive()


def check_order(leader: Leader, followers: list[Follower]) -> None:
    """Checks that all followers get all boundaries, in order."""
    for number in range(50):
        leader.broadcast(boundary(number))
    for follower in followers:
        received = follower.boundaries()
        assert [next(received) for _ in range(50)] == [boundary(n) for n in range(50)]
        follower.completed(49)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Ends, Leader, list[Follower]]]:
    """Process 1 is with the leader, 2 hands on to 3 and 4."""
    with Ends() as ends:
        leader = ends.leader(processes=5)
        followers = []
        for process, host in ((1, "host0"), (2, "host2"), (3, "host2"), (4, "host2")):
            followers.append(ends.follower(leader, process, host=host))
            followers[-1].register()
            followers[-1].ready()
        leader.wait_ready()
        yield ends, leader, followers


def test_a_host_gets_a_boundary_once_and_all_there_have_it_in_order():
    with two_hosts() as (_, leader, followers):
        assert [below.name[:9] for below in leader._below] == ["process 1", "process 2"]
        until(lambda: [len(end.relay.below) for end in followers] == [0, 2, 0, 0])
        check_order(leader, followers)


def test_a_relay_that_hands_on_nothing_more_is_named_within_the_deadline():
    with two_hosts() as (ends, _, followers):
        followers[1].relay.post = lambda message: None
        started = time.monotonic()
        failure = str(ends.failures.get(timeout=WAIT))
        # two heartbeats' limits, the look of a subscriber, and until errors are believed
        assert time.monotonic() - started < 1.0 + 0.5 + 1.0 + 2.0
        relay = r"process 2 \(ffn, host host2, pid 1002\)"
        for process in (3, 4):
            expected = rf"process {process} \(.*\): plans from {relay}: silent for 1\.\d s;"
            assert re.search(expected, failure)
        assert not re.search(r"^process 1|; process 1", failure)


def test_a_relay_whose_connections_break_is_named():
    with two_hosts() as (ends, leader, followers):
        followers[1].relay.close()
        failure = str(ends.failures.get(timeout=WAIT))
        relay = r"process 2 \(ffn, host host2, pid 1002\)"
        assert re.search(rf"process 3 .*: plans from {relay}: the connection closed", failure)
        leader.close(failure=failure, timeout=0.1)
        causes = {str(ends.follower_failures.get(timeout=WAIT)) for _ in followers}
        assert all(failure in cause for cause in causes)  # they wait for the leader's word


def test_broadcast_out_of_order_names_both_numbers():
    with pair() as (_, leader, _):
        leader.broadcast(boundary(0))
        with pytest.raises(EngineFailedError, match="boundary 2 to broadcast where 1 is next"):
            leader.broadcast(boundary(2))


def test_failure_of_a_follower_is_reported_once_with_its_place():
    with pair() as (ends, leader, follower):
        follower.position = lambda: "ffn of lane 1, layer 4, step 9"
        started = time.monotonic()
        follower.fail("ValueError: no such expert", timeout=WAIT)
        assert time.monotonic() - started < WAIT / 2  # the leader says that it knows
        failure = ends.failures.get(timeout=WAIT)
        said = "process 1 (ffn, host host1, pid 1001): ValueError: no such expert"
        assert str(failure) == f"{said}; last seen in ffn of lane 1, layer 4, step 9"
        assert leader.failure is failure
        with pytest.raises(EngineFailedError, match="no such expert"):
            leader.broadcast(boundary(0))
        follower.close()
        time.sleep(0.5)
        assert ends.failures.empty()


def test_stuck_follower_is_named_although_it_beats():
    with pair() as (ends, leader, follower):
        follower.position = lambda: "ffn of lane 2, layer 5, step 812"
        received = follower.boundaries()
        for number in range(2):
            leader.broadcast(boundary(number))
        assert [next(received).number, next(received).number] == [0, 1]
        follower.completed(0)
        started = time.monotonic()
        text = str(ends.failures.get(timeout=WAIT))
        # step_seconds, a heartbeat interval before and after, and slack for a busy machine
        assert time.monotonic() - started < 1.0 + 3 * 0.25 + 2.0
        expected = (
            r"process 1 \(ffn, host host1, pid 1001\): boundary 1 not done after \d\.\d s; "
            r"last seen in ffn of lane 2, layer 5, step 812"
        )
        assert re.fullmatch(expected, text)


def test_leaving_unasked_is_a_failure():
    with pair() as (ends, _, follower):
        follower.close()
        assert "left unasked" in str(ends.failures.get(timeout=WAIT))


def test_collect_brings_what_each_follower_keeps():
    with Ends() as ends:
        leader = ends.leader(processes=3)
        for process_id in (1, 2):
            follower = ends.joined(leader, process_id)
            follower.answer("spans", lambda data=bytes([process_id]) * 3_000_000: data)
        leader.wait_registered()
        assert leader.collect("spans", WAIT) == {1: b"\1" * 3_000_000, 2: b"\2" * 3_000_000}
        with pytest.raises(EngineFailedError, match="could not send 'nothing'"):
            leader.collect("nothing", WAIT)


def test_collect_has_a_deadline_and_a_late_answer_is_none_to_the_next_question():
    with pair() as (_, leader, follower):
        release, answers = threading.Event(), iter([b"late", b"in time"])

        def answer() -> bytes:
            release.wait(WAIT)
            return next(answers)

        follower.answer("spans", answer)
        with pytest.raises(EngineFailedError, match=r"pid 1001\): did not send 'spans' within 0.2"):
            leader.collect("spans", 0.2)
        threading.Timer(0.1, release.set).start()
        assert leader.collect("spans", WAIT) == {1: b"in time"}


def test_questions_of_one_name_at_a_time_have_their_own_answers():
    with pair() as (_, leader, follower):
        numbers = iter(range(100))
        follower.answer("spans", lambda: bytes([next(numbers)]))
        found: list[bytes] = []

        def ask() -> None:
            for _ in range(25):
                found.append(leader.collect("spans", WAIT)[1])

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
        assert sorted(found) == [bytes([number]) for number in range(100)]


def test_a_follower_that_takes_long_to_answer_hears_the_leader():
    with pair() as (ends, leader, follower):
        follower.answer("counts", lambda: bytes(threading.Event().wait(1.6)))  # 1.0 is allowed
        assert leader.collect("counts", WAIT) == {1: b""}
        assert ends.follower_failures.empty()


def test_describe_says_where_everybody_is():
    with pair() as (_, leader, _):
        assert re.fullmatch(
            r"process 1 \(ffn, host host1, pid 1001\): no step seen yet, boundary -1 of -1 done, "
            r"last heard \d\.\d s ago",
            leader.describe(),
        )


def channel_of(follower: Follower) -> Channel:
    assert follower._link is not None
    return follower._link._channel


def test_explain_waits_for_the_follower_behind_an_error():
    error = EngineFailedError("step 54 of lane 1: recv() failed")
    with pair() as (_, leader, follower):
        well = str(leader.explain(error, timeout=0.1))
        assert well.startswith("step 54 of lane 1: recv() failed; process 1 (ffn, host host1, pid ")
        threading.Timer(0.3, channel_of(follower).shutdown).start()
        explained = leader.explain(error, timeout=WAIT)
        assert explained is leader.failure
        assert "the connection closed" in str(explained)


def test_closed_connection_is_named_rather_than_the_errors_it_caused():
    """The survivor of a broken collective reports first."""
    with Ends() as ends:
        leader = ends.leader(processes=3)
        survivor, victim = (ends.joined(leader, process) for process in (1, 2))
        leader.wait_ready()
        survivor.fail("gloo: connection closed by peer", timeout=WAIT)
        threading.Timer(0.3, channel_of(victim).shutdown).start()
        failure = str(ends.failures.get(timeout=WAIT))
        assert failure.startswith("process 2 (ffn, host host2, pid 1002): the connection closed")
        assert "process 1" not in failure


def test_errors_on_both_sides_are_told_together_own_first():
    with pair() as (_, leader, follower):
        threading.Timer(0.1, follower.fail, ["transfer aborted"]).start()
        explained = leader.explain(EngineFailedError("step 54: out of memory"), timeout=WAIT)
        theirs = "process 1 (ffn, host host1, pid 1001): transfer aborted; no step seen yet"
        assert str(explained) == f"step 54: out of memory; {theirs}"


def test_compiling_may_take_long_while_it_progresses():
    """The deadline counts from the last progress, here of 5 × 0.3 s, and then there is none."""
    cluster = Cluster(start_seconds=0.8, step_seconds=0.2, heartbeat_seconds=0.2)
    with Ends() as ends:
        leader = ends.leader(cluster=cluster)
        follower = ends.follower(leader, cluster=cluster)
        steps = iter([*(step for step in range(20) for _ in range(3)), *([20] * 1000)])
        follower.progress = lambda: next(steps)  # one more every third heartbeat of 0.05 s
        follower.register()
        started = time.monotonic()
        expected = r"process 1 .*: did not compile within 0.8 s of the last progress"
        with pytest.raises(EngineFailedError, match=expected):
            leader.begin_warm_up()
        assert time.monotonic() - started > 2 * 0.8
        assert ends.failures.empty()


def test_a_follower_that_is_asked_to_end_drains_the_deployment_once():
    drains: queue.Queue[str] = queue.Queue()
    with Ends() as ends:
        leader = ends.leader(on_drain=drains.put)
        follower = ends.joined(leader)
        for _ in range(2):
            follower.request_drain("SIGTERM")
        assert drains.get(timeout=WAIT) == "process 1 (ffn, host host1, pid 1001): SIGTERM"
        time.sleep(0.6)
        assert drains.empty()
        assert ends.failures.empty()


@golden.table("fleet/parents.yaml")
def test_parents(host: str, followers: list[str], expected: int | None) -> None:
    assert parent_of(host, "a", followers) == expected


def test_nobody_hands_on_to_more_hosts_than_a_few_however_many_there_are() -> None:
    hosts = [f"host{number}" for number in range(1, 400)]
    parents = [parent_of(host, "host0", hosts[:at]) for at, host in enumerate(hosts)]
    assert parents[:9] == [None] * 8 + [0]
    assert all(parent is None or parent < at for at, parent in enumerate(parents))
    most = max(map(parents.count, set(parents)))
    assert most == HOSTS_EACH == 8

    def depth(at: int | None) -> int:
        return 0 if at is None else 1 + depth(parents[at])

    assert max(map(depth, range(399))) == 3
