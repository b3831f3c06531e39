"""Reports of a follower to its leader: its part of the counts of experts, and boundaries that are
done on the devices. Knows no engine: ffn workers over `pull` follow, too (`ffn_group.py`)."""

import queue
import threading
from typing import Any

import jax
import msgspec

from jaxserve.fleet.collected import Counts
from jaxserve.fleet.follower import Follower
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


class Completions:
    """Reports boundaries that are done on the devices to the leader, from a thread of its own."""

    def __init__(self, follower: Follower):
        self._follower = follower
        self._queue: queue.SimpleQueue[tuple[int, jax.Array | None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="jaxserve-completions", daemon=True).start()

    def put(self, number: int, last: Any) -> None:
        """Queues boundary `number`, which is done once `last` is ready; None: it had no step."""
        self._queue.put((number, last))

    def _run(self) -> None:
        while True:
            number, last = self._queue.get()
            try:
                if last is not None:
                    last.block_until_ready()
            except Exception as error:
                self._follower.fail(f"{type(error).__name__}: {error}")
                return
            self._follower.completed(number)
