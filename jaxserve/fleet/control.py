"""The messages between the leader and its followers.

Each follower has one channel to the leader (`link/session/channel.py`). Beside the channels a tree
of connections carries the messages that come with every step and are the same for all
(`broadcast.py`). Every message is msgpack of one of the structs below; nothing is ever unpickled.
`leader.py` and `follower.py` are the two ends; the engine on the leader and the driver on a
follower see `Boundary` and `Position`. Knows nothing of sockets, requests or device arrays.

    follower → leader   Register  Subscribed
                        (Heartbeat | Compiled | Collected | Report | DrainRequest)*
                        Failure?  Leaving
    leader → follower   Accepted  Joined  (LeaderHeartbeat | WarmUp | Collect)*  FailureReceived?
                        Shutdown, where it is not an orderly one; or Refused
    leader → all        (Boundary | LeaderHeartbeat)*  Shutdown
"""

import hashlib
from collections.abc import Callable, Sequence

import msgspec

from jaxserve.config.deployment import Cluster
from jaxserve.roles.actions import Action
from jaxserve.roles.step_plan import StepPlan

PROTOCOL = 12
"""Raised whenever a message below changes its meaning."""

MAX_MESSAGE_BYTES = 256 << 20
"""Cap of one message: step plans take kilobytes, the spans of a long timeline some megabytes."""


class Position(msgspec.Struct, frozen=True):
    """Where a process is in its schedule."""

    stage: str
    lane: int
    layer: int
    step: int
    """Number of the step plan."""

    def __str__(self) -> str:
        return f"{self.stage} of lane {self.lane}, layer {self.layer}, step {self.step}"


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Description that a process sends of itself when it joins.

    All fields but the first four must be the same for all processes.
    """

    process_id: int
    role: str
    host: str
    pid: int
    processes: int
    protocol: int = PROTOCOL
    versions: dict[str, str] = {}
    """Versions of the packages that must be the same everywhere."""
    digest: str = ""
    """Digest of `facts`."""
    facts: dict[str, str] = {}
    """The deployment, one dotted key a value, so that a difference can be named."""

    def __str__(self) -> str:
        return f"process {self.process_id} ({self.role}, host {self.host}, pid {self.pid})"


class Register(msgspec.Struct, frozen=True, tag=True):
    """First message of a follower."""

    identity: Identity
    port: int = 0
    """Port on which it hands on the messages of the tree."""


class Joined(msgspec.Struct, frozen=True, tag=True):
    """All processes have registered and receive the broadcast."""


class Subscribed(msgspec.Struct, frozen=True, tag=True):
    """A follower receives the broadcast, from where `Accepted` sent it."""


class Compiled(msgspec.Struct, frozen=True, tag=True):
    """A follower has loaded and compiled everything, and waits for `WarmUp`."""

    weights: str = ""
    """Digest of the weights that it has loaded; known only once all files are hashed."""


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """A follower is alive and has come this far."""

    completed: int
    """Number of the last boundary whose work is done; -1 before the first."""
    ready: bool
    """True once it is warm."""
    position: Position | None = None
    progress: int = 0
    """Grows as long as the follower loads or compiles (`progress.advances`)."""


class Collected(msgspec.Struct, frozen=True, tag=True):
    """Answer to the `Collect` of that number; `error` is empty where it went well."""

    number: int
    data: bytes
    error: str = ""


class Failure(msgspec.Struct, frozen=True, tag=True):
    """A follower cannot continue."""

    text: str
    position: Position | None = None


class Report(msgspec.Struct, frozen=True, tag=True):
    """A message over `pull` has arrived at a follower whole (`link.remote.frames.NamedMessage`)."""

    data: bytes


class DrainRequest(msgspec.Struct, frozen=True, tag=True):
    """A follower was asked to end (SIGTERM), so the whole deployment should."""

    reason: str


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """A follower has done everything it was sent, and closes the connection."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The leader does not accept a follower, and closes the connection."""

    reason: str


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The leader accepts a follower's registration."""

    leader: Identity
    next_number: int
    """Number that the next boundary will carry."""
    source: str = ""
    """`host:port` from which the follower gets the broadcast; without a host: the leader's."""
    source_name: str = "the leader"
    """Name of the process at `source`."""


class WarmUp(msgspec.Struct, frozen=True, tag=True):
    """All processes have compiled: the steps that warm them up may begin."""


class Boundary(msgspec.Struct, frozen=True, tag=True):
    """Steps that every process enqueues next, in this order."""

    number: int
    """Consecutive, from 0."""
    plans: list[StepPlan]
    digest: str
    """`shapes_digest` of the plans, which every follower computes again."""
    measured: bool = False
    """Whether what is enqueued from here to the next boundary is measured (`observe/probe.py`)."""
    actions: list[Action] = []
    """Actions that every process carries out before the plans begin."""
    message: bytes = b""
    """Order of an ffn worker over `pull` (`link.remote.frames`); empty: none."""


class LeaderHeartbeat(msgspec.Struct, frozen=True, tag=True):
    """The leader is alive, with or without work."""


class Collect(msgspec.Struct, frozen=True, tag=True):
    """Asks every follower for the bytes it keeps under a name."""

    number: int
    name: str


class FailureReceived(msgspec.Struct, frozen=True, tag=True):
    """The leader has the follower's `Failure`: that process may now end."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """The deployment ends; `failure` says why where that was not wanted."""

    failure: str = ""


_End = DrainRequest | Failure | Leaving
FromFollower = Register | Subscribed | Compiled | Heartbeat | Collected | Report | _End
FromLeader = (
    Refused
    | Accepted
    | Joined
    | WarmUp
    | Boundary
    | LeaderHeartbeat
    | Collect
    | FailureReceived
    | Shutdown
)

encode: Callable[[msgspec.Struct], bytes] = msgspec.msgpack.Encoder().encode
decode_from_follower = msgspec.msgpack.Decoder(FromFollower).decode
decode_from_leader = msgspec.msgpack.Decoder(FromLeader).decode


def shapes_digest(deployment_digest: str, plans: Sequence[StepPlan]) -> str:
    """Fingerprint of everything that fixes the shapes of a boundary's arrays.

    Leader and followers compute it independently: processes that disagree on a capacity would
    otherwise exchange arrays that mean something else to each, in silence.
    """
    text = "".join(
        f"|{plan.number},{plan.domain}.{plan.lane},{plan.bucket.tokens},{plan.bucket.pages}"
        f",{plan.bucket.drafts}"
        for plan in plans
    )
    return hashlib.blake2s((deployment_digest + text).encode(), digest_size=8).hexdigest()


def heartbeat_interval(cluster: Cluster) -> float:
    """Seconds between two heartbeats, short enough for all deadlines that build on them."""
    return min(cluster.heartbeat_seconds / 10, cluster.step_seconds / 4)
