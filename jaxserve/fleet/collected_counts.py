"""Collects the token counts of experts from a leader's followers. Knows no engine: the leader of an
ffn worker over `pull` collects them, too (`ffn_group.py`). `follower_reports.py` is the other end.
"""

import time

import msgspec
import numpy as np

from jaxserve.errors import EngineFailedError
from jaxserve.fleet.collected import COUNTS, Counts
from jaxserve.fleet.leader import Leader
from jaxserve.roles.expert_moves import Counted


def collect_counts(leader: Leader, number: int, timeout: float) -> Counted:
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
