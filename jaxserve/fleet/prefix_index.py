"""Which workers have which prefixes in their caches, as far as a router can know.

A router sees what it sends where, and not what is evicted, so this is a guess that makes some
choices better; nothing is wrong where it is not true. Plain Python.
"""

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

BLOCK = 32
"""Tokens that are compared at a time."""


class PrefixIndex:
    """Blocks of token ids, each with all that came before it, by worker.

    A worker's least recently used blocks are forgotten when it has more than its cache holds.
    """

    def __init__(self) -> None:
        self._workers: dict[int, set[str]] = {}  # block → who has it
        self._blocks: dict[str, OrderedDict[int, None]] = {}  # worker → blocks, last used last
        self._most: dict[str, int] = {}

    def join(self, worker: str, tokens: int) -> None:
        """A worker with an empty cache of so many tokens."""
        self.leave(worker)
        self._blocks[worker], self._most[worker] = OrderedDict(), max(1, tokens // BLOCK)

    def leave(self, worker: str) -> None:
        """Forgets a worker."""
        for block in self._blocks.pop(worker, ()):
            self._drop(worker, block)

    def add(self, worker: str, blocks: Iterable[int]) -> None:
        """A worker computes, or has used, these blocks."""
        own = self._blocks.get(worker)
        if own is None:
            return
        for block in blocks:
            if block in own:
                own.move_to_end(block)
            else:
                own[block] = None
                self._workers.setdefault(block, set()).add(worker)
        while len(own) > self._most[worker]:
            self._drop(worker, own.popitem(last=False)[0])

    def hits(self, blocks: Iterable[int]) -> dict[str, int]:
        """Worker → tokens of the prefix that it has; without those that have none."""
        found: dict[str, int] = {}
        holders: set[str] | None = None
        for number, block in enumerate(blocks, start=1):
            having = self._workers.get(block)
            holders = having if holders is None else holders & (having or set())
            if not holders:
                break
            found |= dict.fromkeys(holders, number * BLOCK)
        return found

    def _drop(self, worker: str, block: int) -> None:
        workers = self._workers[block]
        workers.discard(worker)
        if not workers:
            del self._workers[block]


def blocks_of(token_ids: list[int], salt: str) -> list[int]:
    """A number for each full block of a prompt, which stands for all tokens up to its end."""
    data = np.asarray(token_ids, "<i4").tobytes()
    state = hash(salt)
    found = []
    for end in range(4 * BLOCK, len(data) + 1, 4 * BLOCK):
        state = hash((state, data[end - 4 * BLOCK : end]))
        found.append(state)
    return found
