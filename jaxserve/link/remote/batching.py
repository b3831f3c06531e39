"""Which messages of several domains an expert pool runs in one pass (xDeepServe §5.2, §5.3).

A policy is told of every message that arrives and decides, each time it is asked, what to run next
or how long to wait. It has no clock, threads or arrays of its own: the message server
(`passes.py`) and the planner's simulator (`planner/pool.py`) run the same classes.

A batch has messages of one layer and shape, at most one of a domain: the lanes of a domain exist to
overlap, so no domain takes more than its part of a pass.

- `Turns` serves one message a pass. The domain that was served longest ago is next.
- With `most` above 1 it adds the other domains' messages of that layer which wait at the time.
- `Cohorts` (`cohorts.py`) also waits for messages that it expects, where that costs less than
  running without them.
"""

import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

NEVER = float("inf")
Key = tuple[Hashable, int]
"""Identity of a lane among those of all domains: the domain's connection, and its lane."""


@dataclasses.dataclass(eq=False, slots=True)
class Waiting:
    """A message that has arrived whole.

    Attributes:
      domain: identity of the domain's present connection.
      lane: lane of the domain; has no other message before this one is answered.
      layer: layer to run.
      shape: everything else that must be equal in a batch.
      cohort: lanes with the same value are run together where possible.
      arrived, taken: when it came, and when a pass took it, in seconds; set by the policy.
      key: identity of the message's lane.
    """

    domain: Hashable
    lane: int
    layer: int
    shape: Hashable
    cohort: Hashable
    arrived: float = dataclasses.field(default=0.0, init=False)
    taken: float = dataclasses.field(default=0.0, init=False)
    key: Key = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.key = self.domain, self.lane


class Decision[Message: Waiting](NamedTuple):
    """Decision of a policy."""

    batch: Sequence[Message] = ()
    """Messages to run now; none: wait."""
    at: float = NEVER
    """When to ask again, if no message arrives before."""


class Turns:
    """Serves the domain whose last turn is longest ago, newcomers first.

    Args:
      most: most messages of a batch; 1: a pass a message.
    """

    def __init__(self, most: int = 1):
        self.most = most
        self.left_behind, self.misjudged = 0, 0.0
        """See `FFNWorkerView`."""
        self._waiting: dict[Key, Waiting] = {}
        """Messages by lane, in the order of their arrival."""
        self._domains: dict[Hashable, Any] = {}
        """Domains that have sent messages; here the number of each one's last turn."""
        self._count = 0

    @property
    def places(self) -> int:
        """Most messages that a pass may have now: one of each domain."""
        return min(self.most, len(self._domains))

    def put(self, message: Waiting, now: float) -> bool:
        """Takes a message that has arrived; replaces an older one of the same lane. Returns whether
        an idle pool is to ask again at once."""
        message.arrived = now
        self._waiting.pop(message.key, None)
        self._waiting[message.key] = message
        return True

    def take(self, now: float, *, idle: bool) -> Decision:
        """Decides what to run now. A pass of several messages is chosen only once the pool is idle,
        because more may arrive until then.

        Args:
          idle: whether the pool has no pass under way.
        """
        if not self._waiting or (self.most > 1 and not idle):
            return Decision()
        order = sorted(self._waiting.values(), key=lambda one: self._domains.get(one.domain, 0))
        batch, *_ = batches(order, self.most)
        for message in batch:
            self._count += 1
            self._domains[message.domain] = self._count
            del self._waiting[message.key]
        return Decision(batch)

    def served(self, batch: Sequence[Waiting], now: float) -> None:
        """Notes that the answers of a batch are computed; nothing follows from it here."""

    def forget(self, domain: Hashable) -> None:
        """Drops a domain's messages, and expects no more from it."""
        self._waiting = {key: one for key, one in self._waiting.items() if one.domain != domain}
        self._domains.pop(domain, None)


def batches[Message: Waiting](messages: Iterable[Message], most: int) -> list[list[Message]]:
    """Divides messages into batches of one layer and shape, of at most `most` messages and one of a
    domain, in the order of their first messages."""
    made: list[tuple[Hashable, dict[Hashable, Message]]] = []
    for message in messages:
        group = message.layer, message.shape
        for of, batch in made:
            if of == group and len(batch) < most and message.domain not in batch:
                break
        else:
            made.append((group, batch := {}))
        batch[message.domain] = message
    return [list(batch.values()) for _, batch in made]
