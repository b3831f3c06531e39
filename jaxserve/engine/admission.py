"""Who is let in first, and where to: the two judgements behind admission.

Called by `scheduler.py`. Plain arithmetic over requests and pages.
"""

from jaxserve.engine.prefix_cache import PageNode
from jaxserve.engine.request import Request
from jaxserve.engine.sequence import DPGroup

PATIENCE = 10.0
"""Seconds after which a request of priority 0 is due; every priority adds or takes as many."""


def due(request: Request) -> float:
    """When a request should be served, in seconds of its arrival's clock."""
    patient = request.arrival + PATIENCE * (1 + request.params.priority)
    return patient if request.deadline is None else min(patient, request.deadline)


class Place:
    """A DP group with a free slot, and what it has: noted once, asked for all who wait."""

    def __init__(self, group: DPGroup):
        self.group = group
        self.note()

    def note(self) -> None:
        """Looks at the group again."""
        free = self.group.free_pages
        self._burden = self.group.pool.pages - free + self.group.promised
        self._room = free - self.group.residents_count  # a page to spare for each of them

    def cost(self, pages: int, prefix: list[PageNode]) -> int | None:
        """What letting a sequence in would cost, in pages; None if there are too few (xDeepServe
        §4.3).

        The group's KV cache afterwards, with the room that its sequences will need to come to
        their full length, and once more the pages that have to be computed.

        Args:
          pages: that the sequence needs at once.
          prefix: those that the group's prefix cache has.
        """
        computed = pages - len(prefix)
        awakened = sum(not node.users for node in prefix) if prefix else 0
        if computed > self._room - awakened:
            return None
        return self._burden + awakened + 2 * computed
