"""Admission: which request is next, and to which DP group it goes.

Called by `scheduler.py`, whose docstring has the policy. Plain arithmetic over requests and pages.
"""

import bisect
import itertools
from collections.abc import Sequence as Items

from jaxserve.engine.dp_group import DPGroup
from jaxserve.engine.fetches import Fetches
from jaxserve.engine.pages import pages_for
from jaxserve.engine.prefix_cache import PageNode
from jaxserve.engine.sequence import Sequence


class GroupLoad:
    """The load of a DP group with a free slot, computed once for all waiting requests."""

    def __init__(self, group: DPGroup):
        self.group = group
        self.refresh()

    def refresh(self) -> None:
        """Updates the load after an admission."""
        free = self.group.free_pages
        self._used = self.group.pool.pages - free + self.group.promised
        self._available = free - self.group.residents_count  # a page to spare for each of them

    def cost(self, pages: int, prefix: list[PageNode]) -> int | None:
        """What admitting a sequence would cost, in pages; None if there are too few (xDeepServe
        §4.3).

        The group's KV cache afterwards, with the pages that its sequences will need to come to
        their full length, and once more the pages that have to be computed.

        Args:
          pages: that the sequence needs at once.
          prefix: those that the group's prefix cache has.
        """
        computed = pages - len(prefix)
        # Pages without users count as free until now; they are the last ones of a path.
        unused = sum(1 for _ in itertools.takewhile(lambda node: not node.users, reversed(prefix)))
        if computed > self._available - unused:
            return None
        return self._used + unused + 2 * computed


class AdmissionQueue:
    """The sequences that wait for pages and a slot, the first due first.

    Args:
      groups: where they are admitted to.
      page_size: tokens a page.
      fetches: begun for sequences whose first pages are elsewhere.
    """

    def __init__(self, groups: Items[DPGroup], page_size: int, fetches: Fetches):
        self._groups, self._page_size, self._fetches = groups, page_size, fetches
        self.waiting: list[Sequence] = []
        self.prompt_tokens = 0
        """Prompt tokens that were looked up in the prefix cache, since the start."""
        self.prompt_tokens_found = 0
        """How many of `prompt_tokens` were found there."""
        self._admitted: list[Sequence] = []

    def push(self, sequence: Sequence) -> None:
        """Queues a sequence in the order of ranks."""
        bisect.insort(self.waiting, sequence, key=rank)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out that will not be admitted."""
        self.waiting.remove(sequence)

    def take_admitted(self) -> list[Sequence]:
        """The sequences that were admitted for the first time since this was called last."""
        admitted, self._admitted = self._admitted, []
        return admitted

    def cost(self, sequence: Sequence) -> int | None:
        """What admitting a sequence now would cost, in pages; None: it would have to wait."""
        if self.waiting:
            return None
        loads = [GroupLoad(group) for group in self._groups if not group.full]
        best = _cheapest(loads, sequence, self._pages(sequence))
        return None if best is None else best[0]

    def admit(self) -> None:
        """Admits from the head of the queue, as long as the first one fits a group."""
        if not self.waiting:
            return
        loads = [GroupLoad(group) for group in self._groups if not group.full]
        while self.waiting and not self.waiting[0].home:  # else preempted, with a step in flight
            sequence = self.waiting[0]
            pages = self._pages(sequence)
            best = _cheapest(loads, sequence, pages)
            if best is None:
                return
            _, load, prefix = best
            del self.waiting[0]
            if sequence.found is None:
                self._admitted.append(sequence)
                self.prompt_tokens += len(sequence.tokens)
                self.prompt_tokens_found += len(prefix) * self._page_size
            group = load.group
            group.admit(sequence, group.lane_for(sequence), pages, prefix)
            self._fetches.begin(sequence)
            load.refresh()
            if group.full:
                loads.remove(load)

    def _pages(self, sequence: Sequence) -> int:
        """How many pages the sequence needs at admission."""
        tokens = min(len(sequence.tokens) + 1, sequence.longest_cache)
        return pages_for(tokens, self._page_size)


def rank(sequence: Sequence) -> tuple[float, int]:
    """The sort key of waiting and resident sequences."""
    return sequence.rank


def _cheapest(
    loads: Items[GroupLoad], sequence: Sequence, pages: int
) -> tuple[int, GroupLoad, list[PageNode]] | None:
    """The least cost of taking the sequence in, the group that has it, and what its prefix cache
    has of the sequence."""
    best: tuple[int, GroupLoad, list[PageNode]] | None = None
    for load in loads:
        prefix = load.group.match(sequence)
        cost = load.cost(pages, prefix)
        if cost is not None and (best is None or cost < best[0]):
            best = cost, load, prefix
    return best
