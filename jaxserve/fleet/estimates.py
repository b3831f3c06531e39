"""A router's estimates: seconds of a prompt, tokens of an output, the wait for a first token, and
which prefixes each worker has in its cache.

Times are moving averages of measurements. A router knows the prompts that it sends to a worker, but
not what the worker evicts. A wrong estimate costs time and nothing else. Called by `coordinator.py`
and `placement.py`; pure.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxserve.config.deployment import Deployment
from jaxserve.errors import OverloadedError
from jaxserve.fleet.routed import Routed, Worker

WEIGHT = 0.1
"""Weight of the newest measurement in a moving average."""
FIRST_OUTPUT = 128.0
"""Expected tokens of an output before any output has ended."""


def _average(old: float, new: float) -> float:
    """Returns the moving average after one more measurement; 0 means that none was made before."""
    return old + WEIGHT * (new - old) if old else new


def prompt_cost(length: int, cached: Any, attention_cost: Any) -> Any:
    """Returns what a prompt costs a worker that has cached its first tokens, in tokens of a short
    prompt; with arrays, workers.

    Args:
      attention_cost: as in `WorkerFacts`.
    """
    return length - cached + attention_cost * (length**2 - cached**2)


class Estimates:
    """The estimates of one router.

    Args:
      deployment: the targets in `fleet`.
    """

    def __init__(self, deployment: Deployment):
        self._fleet = deployment.fleet
        self._output = FIRST_OUTPUT
        self._speed = 0.0  # of all prefill workers together

    def began(self, worker: Worker, cost: float, now: float) -> None:
        """Notes that a prefill worker gets a prompt."""
        if not worker.work:
            worker.busy_since = now
        worker.work += cost

    def computed(self, worker: Worker, cost: float, now: float) -> None:
        """Notes that a prefill worker has computed a prompt."""
        self.dropped(worker, cost)
        seconds = now - worker.busy_since
        worker.busy_since = now
        if seconds > 0:
            worker.speed = _average(worker.speed, cost / seconds)
            self._speed = _average(self._speed, cost / seconds)

    def dropped(self, worker: Worker, cost: float) -> None:
        """Notes that a prefill worker need not compute a prompt any more."""
        worker.work = max(0.0, worker.work - cost)

    def seconds(self, speeds: Any, costs: Any) -> Any:
        """Returns prefill workers' seconds for costs; unknown speeds (0) count as the average."""
        return costs / np.where(speeds, speeds, self._speed or 1.0)

    def paced(self, worker: Worker, seconds: float) -> None:
        """Notes the seconds between two tokens of a request at a domain."""
        worker.pace = _average(worker.pace, seconds)

    def ended(self, tokens: int) -> None:
        """Notes the tokens of an output that has ended."""
        self._output = _average(self._output, tokens)

    def promised(self, request: Routed) -> int:
        """Tokens that a request will take of a domain's cache."""
        more = max(self._output, len(request.emitted) + 1.0)
        return len(request.job.prompt) + int(min(request.job.max_tokens, more))

    def taken(self, worker: Worker) -> float:
        """Tokens of a domain's cache that requests take: those of this router and, as the domain
        reports them, of other routers."""
        if not worker.others:
            return float(worker.promised)
        usage = sum(worker.load.kv_usage) / max(1, len(worker.load.kv_usage))
        others = usage * worker.facts.tokens * worker.others / max(1, worker.count)
        return worker.promised + others

    def wait(self, worker: Worker) -> float:
        """Seconds that a request waits at a domain for a slot."""
        ahead = worker.count - worker.facts.slots + 1
        return max(0, ahead) * self._output * worker.pace / worker.facts.slots

    def check(self, prefill: Worker | None, cost: float, domains: Sequence[Worker]) -> None:
        """Raises OverloadedError, with the estimate, if a target would be missed.

        Times that are not known yet count as 0.
        """
        if not domains:
            return
        domain = min(domains, key=lambda worker: (self.wait(worker), worker.pace))
        first = self.wait(domain) + domain.pace
        if prefill is not None and prefill.speed:
            first += (prefill.work + cost) / prefill.speed
        target = self._fleet.ttft_seconds
        if target and first > target:
            raise OverloadedError(
                f"the first token is expected after {first:.2f} s, and fleet.ttft_seconds = "
                f"{target:g}",
                retry_after_s=first - target,
            )
        target, pace = self._fleet.tpot_seconds, min(worker.pace for worker in domains)
        if target and pace > target and all(worker.count for worker in domains):
            raise OverloadedError(
                f"a token is expected to take {pace:.3f} s, and fleet.tpot_seconds = {target:g}",
                retry_after_s=self._output * pace,
            )


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
