"""The messages between the leader and its followers, and what a leader collects from them.

Each follower has one session with the leader (`link/session/`). A few processes also hand the
messages for all on to those below them (`follower.py`), over sessions that begin in the same way.
Every message is msgpack of one of the structs below; nothing is ever unpickled. `leader.py` and
`follower.py` are the two ends; the engine on the leader and the driver on a follower see
`Boundary`. Knows nothing of sockets, requests or engines: an ffn worker over `pull` has none.

    follower → leader   Register  (FollowerState | Collected | MessageArrived)*
    leader → follower   Accepted  Joined  (Echo | WarmUp | Collect)*  FailureReceived?
                        Shutdown, where it is not an orderly one; or Refused
    leader → all        (Boundary | Echo)*  Shutdown
"""

import hashlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from jaxserve.config.sections import Cluster
from jaxserve.errors import EngineFailedError
from jaxserve.link.session.hello import Hello
from jaxserve.link.session.messages import Echo, Greeting
from jaxserve.roles.expert_slots import ExpertSlots, counts_of_ranks
from jaxserve.roles.step_plan import StepPlan
from jaxserve.roles.worker import Action, Counted

if TYPE_CHECKING:
    from jaxserve.fleet.leader import Leader


PROTOCOL = 14
"""Raised whenever a message below changes its meaning."""

MAX_MESSAGE_BYTES = 256 << 20
"""Cap of one message: step plans take kilobytes, the spans of a long timeline some megabytes."""


class Identity(Hello, frozen=True, kw_only=True):
    """Introduction of one process of a runtime; its facts must be the same for all of them."""

    digest: str
    """Digest of the facts."""
    process_id: int
    host: str
    processes: int

    def __str__(self) -> str:
        return self.worker


class Register(Greeting, frozen=True, tag="register"):
    """First message of a follower, to the leader and to the one that hands the plans on to it."""

    hello: Identity
    port: int = 0
    """Port on which it hands on the messages for all."""


class Accepted(Greeting, frozen=True, tag="accepted"):
    """The answer to `Register`."""

    hello: Identity
    source: str = ""
    """`host:port` of the follower that hands on the messages for all; empty: the leader does."""
    source_name: str = ""
    """Name of the process at `source`."""


class Joined(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """All processes have registered and receive the messages for all."""


class FollowerState(msgspec.Struct, tag=True, array_like=True):
    """A follower is alive and has come this far."""

    completed: int = -1
    """Number of the last boundary whose work is done; -1 before the first."""
    ready: bool = False
    """True once it is warm."""
    position: str = ""
    """Where it is in its schedule, in words; empty before the first step."""
    progress: int = 0
    """Grows as long as the follower loads or compiles (`progress.advances`)."""
    subscribed: bool = False
    """True once the follower receives the messages for all, from where `Accepted` sent it."""
    weights: str | None = None
    """Digest of the weights that it has loaded, once it has compiled and waits for `WarmUp`; all
    files are hashed only then."""
    drain: str = ""
    """Why the follower was asked to end: the whole deployment should drain."""
    error: str = ""
    """Why it cannot continue."""
    leaving: bool = False
    """True once nothing follows."""


class Collected(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer to the `Collect` of that number; `error` is empty where it went well."""

    number: int
    data: bytes
    error: str = ""


class MessageArrived(msgspec.Struct, frozen=True, tag="Report", array_like=True):
    """A message over `pull` has arrived at a follower whole (`link.remote.frames.NamedMessage`)."""

    data: bytes


class WarmUp(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """All processes have compiled: the steps that warm them up may begin."""


class Boundary(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Steps that every process enqueues next, in this order."""

    number: int
    """Consecutive, from 0."""
    plans: list[StepPlan]
    digest: str
    """`shapes_digest` of the plans, which every follower computes again."""
    measured: bool = False
    """Whether the stages from here to the next boundary are measured (`observe/probe.py`)."""
    actions: list[Action] = []
    """Actions that every process carries out before the plans begin."""
    message: bytes = b""
    """Order of an ffn worker over `pull` (`link.remote.frames`); empty: none."""


class Collect(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Asks every follower for the bytes it keeps under a name."""

    number: int
    name: str


class FailureReceived(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The leader has the follower's error: that process may now end."""


class Shutdown(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The deployment ends; `failure` says why where that was not wanted."""

    failure: str = ""


FromFollower = FollowerState | Collected | MessageArrived
ForAll = Boundary | Echo | Shutdown
FromLeader = Joined | WarmUp | Boundary | Collect | FailureReceived | Shutdown


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


SPANS = "spans"
"""Name of the followers' measured spans."""
COUNTS = "counts"
"""Name of the experts' token counts, as the latest `CountExperts` found them."""
MEASURED = "measured"
"""Name of what the followers' probes measured."""


class Counts(msgspec.Struct, frozen=True):
    """A follower's part of the experts' counts (`roles.worker.Counted`)."""

    number: int | None
    """Number of the latest `CountExperts`; None: the follower has no experts."""
    layers: int = 0
    ranks: dict[int, bytes] = {}
    unread: str = ""


def own_counts(slots: ExpertSlots | None) -> bytes:
    """Encodes this process's part of the counts; waits for the devices."""
    if slots is None:
        return msgspec.msgpack.encode(Counts(None))
    if (taken := slots.counted) is None:
        return msgspec.msgpack.encode(Counts(-1))
    own = counts_of_ranks(taken.counts)
    ranks = {rank: part.astype("<u4").tobytes() for rank, part in own.items()}
    return msgspec.msgpack.encode(Counts(taken.number, len(slots.layers), ranks, slots.unread))


def collect_counts(leader: "Leader", number: int, timeout: float) -> Counted:
    """Returns the followers' parts of the counts with this number, within `timeout` seconds.

    Raises:
      EngineFailedError: one did not answer in time, or has not got so far; names it.
    """
    deadline = time.monotonic() + timeout
    while True:
        left = max(0.1, deadline - time.monotonic())
        parts = [
            msgspec.msgpack.decode(data, type=Counts)
            for data in leader.collect(COUNTS, left).values()
        ]
        if all(part.number in (None, number) for part in parts):
            ranks = {
                rank: np.frombuffer(data, "<u4").reshape(part.layers, -1)
                for part in parts
                for rank, data in part.ranks.items()
            }
            return Counted(ranks, unread="; ".join(part.unread for part in parts if part.unread))
        if time.monotonic() > deadline:
            raise EngineFailedError(f"the counts of experts did not come within {timeout:g} s")
        time.sleep(0.05)
