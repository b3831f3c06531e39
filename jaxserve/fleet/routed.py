"""State of a router: its workers, its requests that have not ended, and the actions about them that
`router.py` carries out.

Decided and changed only by `coordinator.py`. Nothing is on disk: a lost router loses its own
requests, and no other router's.
"""

import bisect
import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from jaxserve.engine.request import FinishReason, TokenOutput
from jaxserve.fleet.request_frames import Cancel
from jaxserve.fleet.worker_frames import Adopt, DrainMode, Release, Renew, Withdraw, WorkerFacts
from jaxserve.link.pages.source import PagesSource
from jaxserve.observe.load import EngineLoad

LOOK_AHEAD = 32
"""Requests of each queue, in order of deadline, that are tried whenever something changes."""


class Job(NamedTuple):
    """Facts of a request that the coordinator needs."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    """Most tokens that the request generates."""
    cache_salt: str = ""
    priority: int = 0
    deadline: float | None = None
    """Time of the coordinator's clock at which the request is given up."""
    whole: bool = False
    """True if the domain must compute the whole prompt itself, as for its log-probabilities."""


@dataclass(eq=False, slots=True)
class Routed:
    """One request, from its arrival to its end.

    | place | means |
    |---|---|
    | waiting | no worker has it: none is connected, or none has room |
    | prefill | a prefill worker computes its prompt |
    | held | a prefill worker has its pages, and no domain has room |
    | domain | a domain has it |
    """

    job: Job
    arrival: float
    rank: tuple[float, int]
    """Position in the order in which waiting requests are served."""
    blocks: list[int] = field(default_factory=list)
    """Blocks of the prompt, as in `PrefixIndex`."""
    emitted: list[int] = field(default_factory=list)
    """Token log: all tokens generated so far."""
    place: Literal["waiting", "prefill", "held", "domain"] = "waiting"
    attempt: str = ""
    """Id of the request at the worker that has it."""
    worker: "Worker | None" = None
    prefill: "Worker | None" = None
    """Worker that computes or holds the request's pages, from `prefill` until the first token."""
    prefill_attempt: str = ""
    source: PagesSource | None = None
    asked: bool = False
    """True if its domain was asked to give it back, because another has a free slot."""
    direct: bool = False
    """True if a prefill worker found that the prompt has no full page to hold."""
    cost: float = 0.0
    """Cost of the prompt for the prefill worker, in tokens."""
    promised: int = 0
    """Estimated tokens that the request will take of its domain's cache."""
    renew_at: float = 0.0
    weights: str = ""
    """Digest of the weights that the request began with; empty: any worker may run it."""
    lost: int = 0
    """Number of workers that were lost while they had the request."""
    placed_at: float = 0.0
    computed_at: float | None = None
    """Time at which a prefill worker had computed the prompt."""
    found: int | None = None
    """Prompt tokens in the prefill worker's prefix cache; None: a domain computes the prompt."""
    waited: float = 0.0
    """Seconds in which no worker had the request, or its pages were held."""
    last_at: float | None = None
    """Time at which its last tokens came."""

    @property
    def tokens(self) -> list[int]:
        """Prompt and token log, joined."""
        return self.job.prompt + self.emitted

    @property
    def length(self) -> int:
        """Number of tokens in prompt and token log."""
        return len(self.job.prompt) + len(self.emitted)

    def cached(self, output: TokenOutput) -> int:
        """Returns the prompt tokens that no worker had to compute, given the domain's first output.

        Entries from a prefill worker are in the domain's prefix cache, too, so if one computed the
        prompt, its count is the right one.
        """
        cached = output.cached_tokens if self.found is None else self.found
        return min(cached, len(self.job.prompt))

    def queued(self, output: TokenOutput) -> float:
        """Seconds that the request waited for workers, given the domain's first output."""
        return self.waited + output.queue_seconds


class WaitingRequests:
    """Requests that no worker has, or whose pages are held until a domain has room, by rank.

    Each place and weights have a queue of their own, so that requests for weights that no worker
    has hold back no others.
    """

    def __init__(self) -> None:
        self._queues: defaultdict[tuple[str, str], list[Routed]] = defaultdict(list)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Routed]:
        """Yields all; they may leave meanwhile."""
        for queue in [*self._queues.values()]:
            yield from [*queue]

    def competing(self, takes: Callable[[str], bool]) -> int:
        """Counts the requests without pages that compete with a new one for the same workers.

        Args:
          takes: whether a worker takes requests that began with these weights.
        """
        return sum(
            len(queue)
            for (place, weights), queue in self._queues.items()
            if place == "waiting" and (not weights or takes(weights))
        )

    def add(self, request: Routed) -> None:
        """Adds a request, whose place and weights stay the same until it leaves."""
        queue = self._queues[request.place, request.weights]
        bisect.insort(queue, request, key=lambda other: other.rank)

    def remove(self, request: Routed) -> None:
        """Removes a request, if it is there."""
        for queue in self._queues.values():
            if request in queue:
                queue.remove(request)

    def first(self) -> Iterator[tuple[Routed, list[Routed]]]:
        """Yields the first requests of all queues by rank, each with its queue, for the caller to
        remove it from: its place and weights have changed by then."""
        first = [[(one, queue) for one in queue[:LOOK_AHEAD]] for queue in self._queues.values()]
        return heapq.merge(*first, key=lambda pair: pair[0].rank)


@dataclass(eq=False, slots=True)
class Worker:
    """State of a connected worker."""

    name: str
    facts: WorkerFacts
    reserved: bool = False
    """True if it takes long prompts only."""
    requests: dict[str, Routed] = field(default_factory=dict)
    """Attempt → this router's request there; at a prefill worker also the held ones."""
    load: EngineLoad = field(default_factory=EngineLoad)
    others: int = 0
    """Requests of other routers, according to its last state."""
    why: str = ""
    """Why the worker gets no new requests: silent, step loop stuck, not ready. Empty otherwise."""
    drain: DrainMode = ""
    """Whether it drains, and what happens to its requests."""
    orphans: dict[str, str] = field(default_factory=dict)
    """Requests there whose router is gone: id → attempt."""
    full_until: float = 0.0
    """Time until which the worker is not asked again, because it had no room."""
    work: float = 0.0
    """Prefill worker: cost of the prompts still to compute."""
    promised: int = 0
    """Domain: tokens of the cache that its requests are expected to take."""
    speed: float = 0.0
    """Prefill worker: cost computed in a second; 0: not known yet."""
    busy_since: float = 0.0
    """Prefill worker: when it last finished a prompt, or began one after being idle."""
    pace: float = 0.0
    """Domain: seconds between the tokens of a request; 0: not known yet."""
    handed: int = 0
    """Prefill worker: tokens whose pages it has handed over."""

    @property
    def suspect(self) -> bool:
        """True if it gets no new requests."""
        return bool(self.why)

    def reaches(self, address: str) -> bool:
        """Returns False while the domain leaves the prefill worker at an address alone."""
        pages = self.load.hand_offs
        return pages is None or address not in pages.timed_out

    @property
    def count(self) -> int:
        """Requests that it has, from all routers."""
        return self.others + len(self.requests)


class SendPrefill(NamedTuple):
    """Sends a prompt to a prefill worker."""

    worker: str
    attempt: str
    request: Routed
    priority: int


class SendSubmit(NamedTuple):
    """Sends a request to a domain, with the source of its pages if they are held."""

    worker: str
    attempt: str
    request: Routed


class SendFrame(NamedTuple):
    """Sends a worker a message that says everything."""

    worker: str
    frame: Adopt | Cancel | Release | Renew | Withdraw


class End(NamedTuple):
    """Ends a request without a last output from a worker."""

    request: Routed
    reason: FinishReason
    error: str | None = None
    unavailable: bool = False
    """True if the request might succeed later."""


Send = SendPrefill | SendSubmit | SendFrame
Action = Send | End
