"""Messages of one attention worker at one process of an ffn worker.

A message of an attention worker has the same number and rows however often it is sent. So it runs
once: a process keeps the answer to the last message of each lane, and gives it to a process of the
attention worker that asks again, over another connection. Connections may therefore be lost one by
one, at any time.

If the ffn worker has several processes, each gets the pieces that land on its devices. Every
process reports a message whose rows have all arrived at it, once; process 0 orders that all run it
next (`server.py`). Plain state and decisions: no threads, no sockets, no arrays of its own.
"""

import dataclasses
import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from jaxserve.link.dispatch.contract import MessageSize
from jaxserve.link.remote.batching import Waiting
from jaxserve.link.remote.frames import NamedMessage


@dataclasses.dataclass(eq=False)
class Arriving[Sender: Hashable](Waiting):
    """A message at one process.

    Attributes:
      domain: the attention worker that sends it.
      shape: its kind and size.
      places: numbers of the pieces that land here.
      waiting: processes that have not reported the message; process 0 decides by them.
      rows: pieces that have arrived, by number.
      needed: rows of each piece that were sent, a bit each; none: all. The answer leaves out the
        other rows.
      senders: connection over which each piece came last.
      landed: the message on the devices, once all its rows are here.
      answer: pieces of the answer, by number; None before the message has run.
    """

    domain: "Domain[Sender]"
    shape: tuple[str, MessageSize]
    what: NamedMessage
    places: Sequence[int]
    waiting: set[int]
    rows: dict[int, Any] = dataclasses.field(default_factory=dict)
    needed: dict[int, bytes] = dataclasses.field(default_factory=dict)
    senders: dict[int, Sender] = dataclasses.field(default_factory=dict)
    landed: Any = None
    answer: dict[int, Any] | None = None

    @property
    def whole(self) -> bool:
        """True once all rows that land here have arrived."""
        return len(self.rows) == len(self.places)

    def take(self, sender: Sender, rows: Mapping[int, Any]) -> bool:
        """Takes rows, and returns whether the last ones that were missing here are among them."""
        if self.answer is not None:
            return False
        self.senders.update(dict.fromkeys(rows, sender))
        begun = self.whole
        self.rows.update(rows)
        return self.whole and not begun


class Domain[Sender: Hashable]:
    """An attention worker: its connections here, and its messages.

    Args:
      name: name of the attention worker, which no earlier start of it had.
      process: number of this process in its ffn worker.
    """

    def __init__(self, name: str, process: int = 0):
        self.name = name
        self.connections: dict[tuple[int, ...], Sender] = {}
        """Connections by the pieces that their processes send."""
        self.left = time.monotonic()
        """When the last of them ended, or the domain was first heard of."""
        self._process = process
        self._messages: dict[int, Arriving[Sender]] = {}
        self._last: dict[int, int] = {}
        """Number of the last complete message of each lane."""

    def message(self, what: NamedMessage, holders: Sequence[int]) -> Arriving[Sender] | None:
        """Returns a message, which begins to arrive if it is new; None if a later one of its lane
        is complete, so that all processes of the attention worker have its answer.

        Args:
          holders: process at which each piece lands.
        """
        if what.number < self._last.get(what.lane, 0):
            return None
        places = [piece for piece, process in enumerate(holders) if process == self._process]
        shape = what.kind, MessageSize(what.pieces, what.rows)
        words = self, what.lane, what.layer, shape, what.lane
        made = Arriving[Sender](*words, what, places, set(holders))
        return self._messages.setdefault(what.number, made)

    def complete(self, message: Arriving[Sender]) -> bool:
        """Notes, in process 0, that all processes have a message, so that all have the answers to
        earlier ones of its lane. Returns whether it is to run: no later one is complete."""
        lane, number = message.what.lane, message.what.number
        if number < self._last.get(lane, 0):
            return False
        self._last[lane] = number
        for one in list(self._messages.values()):
            if one.what.lane == lane and one.what.number < number:
                del self._messages[one.what.number]
        return True

    def ran(self, message: Arriving[Sender], answer: Sequence[Any]) -> dict[Sender, dict[int, Any]]:
        """Keeps the answer to a message, which is complete.

        Returns:
          Pieces of the answer, by number, for each connection over which rows came.
        """
        message.answer = dict(zip(message.places, answer, strict=True))
        senders, message.senders = message.senders, {}
        message.rows, message.landed = {}, None
        self.complete(message)
        parts: dict[Sender, dict[int, Any]] = {}
        for piece, sender in sorted(senders.items()):
            parts.setdefault(sender, {})[piece] = message.answer[piece]
        return parts

    def clear(self) -> None:
        """Forgets all messages, with the connections that they refer to."""
        self._messages.clear()

    def failed(self, number: int) -> list[Sender]:
        """Forgets a message that has no answer, so that it arrives anew when it is sent again, and
        returns the connections over which it came."""
        message = self._messages.pop(number, None)
        return [] if message is None else [*set(message.senders.values())]
