"""The leader's session with a follower, the follower's reports, and the cause of a failure.

Called by `leader.py`, which holds the lock. `find_failure` decides from plain state; the time is an
argument.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, get_args

import msgspec

from jaxserve.config.sections import Cluster
from jaxserve.fleet import control
from jaxserve.fleet.below import HELLO_SECONDS, Below
from jaxserve.link.session.channel import Channel, Deadlines, join_address, split_address
from jaxserve.ports import is_loopback

if TYPE_CHECKING:
    from jaxserve.fleet.leader import Leader

SETTLE_SECONDS = 1.0
"""Seconds that a reported error waits, so that a closing connection is named as the cause first."""


class FollowerSession(Below):
    """One follower as the leader sees it. Times are those of the leader's `AwakeClock`."""

    identity: control.Identity
    """Set once the follower is admitted, as is `address`."""
    address: str
    """`host:port` at which the follower hands on the messages for all."""

    def __init__(self, leader: "Leader", channel: Channel):
        super().__init__("control", channel, leader.identity, Deadlines(handshake=HELLO_SECONDS))
        self._leader = leader
        self.relayed = False
        """True if another follower hands the messages for all on to it."""
        self.state = control.FollowerState()
        """Latest state that the follower has sent."""
        self.lost = ""
        """Reason of an unexpected end of the session."""
        self.error_at = self.advanced_at = 0.0
        """Times when it reported an error, and last had nothing to do or completed a boundary."""
        self.suspect = False
        """True while the log says that it is silent."""
        self.collected = control.Collected(0, b"")
        """Answer of the follower to the latest question."""
        seconds = leader.cluster.silence_seconds(True)  # a message may take as long as silence may
        channel.allow(seconds, seconds)

    def _admit(self, join: control.Register) -> control.Accepted:
        host = split_address(self._channel.peer)[0].removeprefix("::ffff:")
        self.address = join_address("127.0.0.1" if is_loopback(host) else host, join.port)
        return self._leader.admit(self, join.hello)

    def _joined(self) -> None:
        self._leader.joined(self)

    def _limit(self) -> float:
        cluster = self._leader.cluster
        return cluster.silence_seconds(self.state.ready) if self.name else super()._limit()

    def _received(self, message: msgspec.Struct) -> None:
        self._leader.received(self, message)

    def _drop(self) -> None:
        self._leader.ended(self)

    handlers: ClassVar = dict.fromkeys(get_args(control.FromFollower), _received)

    @property
    def problem(self) -> str:
        """Why the follower is gone, in its own words or others'; empty while it is well."""
        return self.state.error or self.lost

    def update(self, message: object, now: float) -> None:
        """Updates the state from a message."""
        match message:
            case control.FollowerState(completed, error=error):
                if completed != self.state.completed:
                    self.advanced_at = now
                if error and not self.state.error:
                    self.error_at = now
                self.state = message
            case control.Collected():
                self.collected = message

    def doubt(self, seconds: float) -> str:
        """Returns the words to log when the follower becomes suspect, after these seconds of
        silence, and when it is well again; otherwise an empty text."""
        gone = self.failure is not None
        suspect = self.state.ready and not gone and self.silent > seconds
        if suspect is self.suspect:
            return ""
        self.suspect = suspect
        if suspect:
            return self.describe(f"suspect, silent for {self.silent:.1f} s")
        return "" if gone else f"{self.identity}: well again"

    def describe(self, problem: str = "") -> str:
        """Names the follower, its problem, and the place where it was seen last."""
        at = self.state.position
        seen = f"last seen in {at}" if at else "no step seen yet"
        return f"{self.identity}: {problem or self.problem}; {seen}"


def find_failure(
    followers: Iterable[FollowerSession],
    now: float,
    *,
    last: int,
    cluster: Cluster,
    step_error: str = "",
) -> str:
    """Names the follower that is to blame; empty while all are well or it is too early to tell.

    The death of one process breaks the transfers and collectives of others, whose error reports may
    arrive before its own connection is seen to close. Causes therefore rank in this order: a closed
    or silent connection, a reported error (once `SETTLE_SECONDS` have passed without the former), a
    late step.

    Args:
      last: number of the last boundary that was broadcast.
      step_error: Error of the leader's own step; comes first where only errors are reported.
    """
    followers = list(followers)
    for follower in followers:
        if follower.lost and not follower.state.error:
            return follower.describe()
    if reported := sorted((f for f in followers if f.state.error), key=lambda f: f.error_at):
        if now - reported[0].error_at < SETTLE_SECONDS:
            return ""
        errors = [follower.describe() for follower in reported]
        return "; ".join([step_error, *errors] if step_error else errors)
    late = []
    for follower in followers:
        completed = follower.state.completed
        if completed >= last:
            follower.advanced_at = now
        stuck = now - follower.advanced_at
        if stuck > cluster.step_seconds + control.heartbeat_interval(cluster):
            late.append(follower.describe(f"boundary {completed + 1} not done after {stuck:.1f} s"))
    return "; ".join(late)
