import msgspec
import pytest

from jaxserve.config.sections import Cluster
from jaxserve.fleet import control
from jaxserve.fleet.control import FollowerState
from jaxserve.fleet.follower import _Source
from jaxserve.fleet.follower_session import FollowerSession
from jaxserve.link.session.messages import encode
from tests.jaxserve.fleet.ends import boundary


def test_boundary_survives_the_wire() -> None:
    sent = boundary(7)
    assert _Source.decode(encode(sent)) == sent


def test_each_direction_takes_only_its_own_messages() -> None:
    assert FollowerSession.decode(encode(FollowerState(3, True))) == FollowerState(3, True)
    with pytest.raises(msgspec.ValidationError):
        _Source.decode(encode(FollowerState(3, True)))
    with pytest.raises(msgspec.DecodeError):
        FollowerSession.decode(b"\x80\x04.")


def test_shapes_digest_depends_on_everything_that_fixes_shapes() -> None:
    plan = boundary(0).plans[0]
    replace = msgspec.structs.replace
    others = [
        [],
        [plan, plan],
        [replace(plan, lane=1)],
        [replace(plan, number=1)],
        [replace(plan, bucket=replace(plan.bucket, tokens=16))],
        [replace(plan, bucket=replace(plan.bucket, pages=8))],
    ]
    digests = {control.shapes_digest("d", [plan]), control.shapes_digest("e", [plan])}
    digests |= {control.shapes_digest("d", plans) for plans in others}
    assert len(digests) == 2 + len(others)


def test_heartbeats_are_frequent_enough_for_all_deadlines() -> None:
    assert control.heartbeat_interval(Cluster(heartbeat_seconds=5, step_seconds=30)) == 0.5
    assert control.heartbeat_interval(Cluster(heartbeat_seconds=5, step_seconds=2)) == 0.5
