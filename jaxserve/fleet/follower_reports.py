"""A follower's part of the counts of experts. Knows no engine: ffn workers over `pull` follow, too
(`ffn_group.py`).
"""

import msgspec

from jaxserve.fleet.collected import Counts
from jaxserve.roles.expert_slots import ExpertSlots, counts_of_ranks


def own_counts(slots: ExpertSlots | None) -> bytes:
    """Encodes this process's part of the counts; waits for the devices."""
    if slots is None:
        return msgspec.msgpack.encode(Counts(None))
    if (taken := slots.counted) is None:
        return msgspec.msgpack.encode(Counts(-1))
    own = counts_of_ranks(taken.counts)
    ranks = {rank: part.astype("<u4").tobytes() for rank, part in own.items()}
    return msgspec.msgpack.encode(Counts(taken.number, len(slots.layers), ranks, slots.unread))
