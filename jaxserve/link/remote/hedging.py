"""A link that asks another ffn worker when the one in use is late.

Only links to shards are such ones (`fleet/shard_links.py`): a slow shard would delay the rows of
all others.
"""

import math
import time
from typing import Any

import jax

from jaxserve.link.remote.client import MessageClient
from jaxserve.link.remote.connection import Unanswered
from jaxserve.link.remote.peer import PeerState

LATE = 4.0
"""Times that an answer takes longer than usual once it is late."""
LEAST_LATE_SECONDS = 0.05
PAUSE_SECONDS = 1.0
"""Least time between two changes of the worker in use, so that slow ones are not asked in turns."""


class HedgedClient(MessageClient):
    """Makes a standby the worker in use as soon as an answer is late, without giving the other up:
    it stands by from then on. Unanswered messages are sent again.

    Processes of one attention worker, which must agree on the worker in use, do not.
    """

    def __init__(self, *addresses: Any, **options: Any):
        super().__init__(*addresses, **options)
        self._sent: dict[int, float] = {}
        """Lane → when its message was sent."""
        self._usual = self._changed_at = 0.0
        """Seconds of an answer, moving mean; and when the worker in use was last changed."""

    def send(self, lane: int, kind: str, layer: int, rows: int, packed: jax.Array) -> None:
        """See `MessageClient`."""
        self._sent[lane] = time.monotonic()
        super().send(lane, kind, layer, rows, packed)

    def receive(self, lane: int) -> jax.Array:
        """See `MessageClient`."""
        answer = super().receive(lane)
        took = time.monotonic() - self._sent[lane]
        # An outage is no measure of what is usual.
        took = min(took, LATE * self._usual or took)
        self._usual += (took - self._usual) / (16 if self._usual else 1)
        return answer

    def _wait_for_answer(self, message: Unanswered) -> None:
        """See `MessageClient`; asks one holder after the other until an answer comes from any."""
        due = math.inf
        if self._usual and not self._shared:
            late = self._sent[message.lane] + max(LEAST_LATE_SECONDS, LATE * self._usual)
            due = max(late, self._changed_at + PAUSE_SECONDS)
        while not self._answered_by(due, message):
            self._ask_another()
            due = time.monotonic() + PAUSE_SECONDS

    def _answered_by(self, end: float, message: Unanswered) -> bool:
        """Waits for an answer until a time; also returns True if no connection can bring one."""
        connections = message.connections
        for connection in connections:
            connection.wait_for(message, end)
        lost = not connections or any(one.failure is not None for one in connections)
        return message.whole or message.error is not None or lost

    def _ask_another(self) -> None:
        """Makes another worker that is up the one in use, and sends it what waits for an answer."""
        with self._changed:
            for peers in self._workers:
                found = [made for peer in peers if (made := peer.connection) is not None]
                up = all(peer.state is PeerState.UP for peer in peers)
                if up and len(found) == len(peers) and found != self._active:
                    self._active, self.last_used = found, peers[0].address
                    self._changed_at = time.monotonic()
                    break
            else:
                return
        self._post_waiting()
