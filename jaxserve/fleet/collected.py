"""Names of what a leader collects from its followers (`Leader.collect`), and the counts of experts.

Knows no engine: the processes of an ffn worker over `pull` have none (`ffn_group.py`).
"""

import time
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from jaxserve.errors import EngineFailedError
from jaxserve.roles.expert_slots import ExpertSlots, counts_of_ranks
from jaxserve.roles.worker import Counted

if TYPE_CHECKING:
    from jaxserve.fleet.leader import Leader

SPANS = "spans"
"""Name of the followers' measured spans."""
COUNTS = "counts"
"""Name of the experts' token counts, as the latest `CountExperts` found them."""
MEASURED = "measured"
"""Name of what the followers' probes measured."""


class Counts(msgspec.Struct, frozen=True):
    """A follower's part of the experts' counts (`roles.expert_moves.Counted`)."""

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
