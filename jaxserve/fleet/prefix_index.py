"""Estimates which prefixes each worker has in its cache, for a router.

A router knows the prompts that it sends to a worker, but not what the worker evicts. A wrong
estimate costs time and nothing else. Plain Python.
"""

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

BLOCK = 32
"""Tokens in a block, the unit of comparison."""


class PrefixIndex:
    """Blocks of token ids that each worker has. A block stands for all tokens up to its end.

    A worker with more blocks than its cache holds loses the least recently used ones.
    """

    def __init__(self) -> None:
        self._workers: dict[int, set[str]] = {}  # block → workers
        self._blocks: dict[str, OrderedDict[int, None]] = {}  # worker → blocks, latest use last
        self._most: dict[str, int] = {}

    def join(self, worker: str, tokens: int) -> None:
        """Adds a worker with an empty cache for this number of tokens."""
        self.leave(worker)
        self._blocks[worker], self._most[worker] = OrderedDict(), max(1, tokens // BLOCK)

    def leave(self, worker: str) -> None:
        """Forgets a worker."""
        for block in self._blocks.pop(worker, ()):
            self._drop(worker, block)

    def add(self, worker: str, blocks: Iterable[int]) -> None:
        """Notes that a worker computes or has used these blocks."""
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
        """Returns worker → tokens of the prefix in its cache, without workers that have none."""
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
    """Numbers each full block of a prompt; a number stands for all tokens up to its end."""
    data = np.asarray(token_ids, "<i4").tobytes()
    state = hash(salt)
    found = []
    for end in range(4 * BLOCK, len(data) + 1, 4 * BLOCK):
        state = hash((state, data[end - 4 * BLOCK : end]))
        found.append(state)
    return found
