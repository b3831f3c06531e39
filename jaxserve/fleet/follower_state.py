"""State of each follower at the leader, and the decision which follower is to blame for a failure.

Called by `leader.py`, which receives the messages and holds the lock. Plain state and decisions: no
threads, no sockets, and the time is an argument.
"""

import queue
from collections.abc import Iterable

from jaxserve.config.deployment import Cluster
from jaxserve.fleet.control import (
    Collected,
    Compiled,
    Failure,
    Heartbeat,
    Identity,
    Leaving,
    Position,
    Subscribed,
    heartbeat_interval,
)

SETTLE_SECONDS = 1.0
"""Seconds that a reported error waits, so that a closing connection is named as the cause first."""


class FollowerState:
    """One follower as the leader sees it. Times are those of the leader's `AwakeClock`."""

    def __init__(self, identity: Identity, now: float, address: str = ""):
        self.identity = identity
        self.address = address
        """`host:port` at which the follower hands the broadcast on."""
        self.outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        """Encoded messages for this follower; None closes its stream."""
        self.position: Position | None = None
        self.completed = -1
        """Last boundary that its devices have completed."""
        self.progress = 0
        """Progress in its last heartbeat."""
        self.subscribed = False
        """True once the follower receives the broadcast."""
        self.compiled = False
        self.weights = ""
        """Digest of its weights, set once it has compiled."""
        self.ready = False
        self.leaving = False
        """True once it has announced that it leaves."""
        self.closed = False
        """True once its stream has ended."""
        self.lost = ""
        """Reason of an unexpected end of the connection."""
        self.error = ""
        """Error that the follower reported."""
        self.error_at = 0.0
        self.message_at = now
        """Time of its last message."""
        self.advanced_at = now
        """Time when it last had nothing to do or completed a boundary."""
        self.suspect = False
        """True while the log says that it is silent."""
        self.collected = Collected(0, b"")
        """Answer of the follower to the latest question."""

    @property
    def problem(self) -> str:
        """Why the follower is gone, in its own words or others'; empty while it is well."""
        return self.error or self.lost

    def received(self, message: object, now: float) -> None:
        """Updates the state from a message."""
        self.message_at = now
        match message:
            case Heartbeat(completed, ready, position, progress):
                if completed != self.completed:
                    self.advanced_at = now
                self.completed, self.position, self.progress = completed, position, progress
                self.ready = self.ready or ready
            case Subscribed():
                self.subscribed = True
            case Compiled(weights):
                self.compiled, self.weights = True, weights
            case Collected():
                self.collected = message
            case Failure(text, position) if not self.error:
                self.error, self.error_at = text, now
                self.position = position or self.position
            case Leaving():
                self.leaving = True

    def doubt(self, now: float, seconds: float) -> str:
        """Returns the words to log when the follower becomes suspect, after these seconds of
        silence, and when it is well again; otherwise an empty text."""
        silent = now - self.message_at
        suspect = self.ready and not self.closed and silent > seconds
        if suspect is self.suspect:
            return ""
        self.suspect = suspect
        if suspect:
            return self.describe(f"suspect, no heartbeat for {silent:.1f} s")
        return "" if self.closed else f"{self.identity}: well again"

    def describe(self, problem: str = "") -> str:
        """Names the follower, its problem, and the place where it was seen last."""
        seen = f"last seen in {self.position}" if self.position else "no step seen yet"
        return f"{self.identity}: {problem or self.problem}; {seen}"


def find_failure(
    followers: Iterable[FollowerState],
    now: float,
    *,
    last: int,
    cluster: Cluster,
    step_error: str = "",
) -> str:
    """Names the follower that is to blame; empty while all are well or it is too early to tell.

    The death of one process breaks the transfers and collectives of others, whose error reports may
    arrive before its own connection is seen to close. Causes therefore rank in this order: a closed
    connection, silence, a reported error (once `SETTLE_SECONDS` have passed without the former), a
    late step.

    Args:
      last: number of the last boundary that was broadcast.
      step_error: Error of the leader's own step; comes first where only errors are reported.
    """
    followers = list(followers)
    for follower in followers:
        if follower.lost and not follower.error:
            return follower.describe()
    for follower in followers:
        silent = now - follower.message_at
        if silent > cluster.silence_seconds(follower.ready) and not follower.closed:
            return follower.describe(f"no heartbeat for {silent:.1f} s")
    if reported := sorted((f for f in followers if f.error), key=lambda f: f.error_at):
        if now - reported[0].error_at < SETTLE_SECONDS:
            return ""
        errors = [follower.describe() for follower in reported]
        return "; ".join([step_error, *errors] if step_error else errors)
    late = []
    for follower in followers:
        if follower.completed >= last:
            follower.advanced_at = now
        stuck = now - follower.advanced_at
        if stuck > cluster.step_seconds + heartbeat_interval(cluster):
            problem = f"boundary {follower.completed + 1} not done after {stuck:.1f} s"
            late.append(follower.describe(problem))
    return "; ".join(late)
