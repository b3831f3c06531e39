"""State of a router: its requests that have not ended, and its workers.

Made and changed by `coordinator.py` alone. Nothing is on disk: a router that is lost loses its own
requests, and no other router's.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from jaxserve.engine.interface import EngineLoad
from jaxserve.engine.request import TokenOutput
from jaxserve.fleet.worker_frames import DrainMode, WorkerFacts
from jaxserve.link.pages.source import PagesSource


class Job(NamedTuple):
    """Facts of a request that the coordinator needs."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    """The most that it will generate."""
    cache_salt: str = ""
    priority: int = 0
    deadline: float | None = None
    """In the coordinator's clock."""
    whole: bool = False
    """Whether the domain has to compute the whole prompt itself, as for its log-probabilities."""


@dataclass(eq=False, slots=True)
class Routed:
    """One request, from its arrival to its end.

    | place | means |
    |---|---|
    | waiting | no worker has it: none is there, or none has room |
    | prefill | a prefill worker computes its prompt |
    | held | a prefill worker has its pages, and no domain has room |
    | domain | a domain has it |
    """

    job: Job
    arrival: float
    rank: tuple[float, int]
    """The order in which requests that wait are served."""
    blocks: list[int] = field(default_factory=list)
    """Blocks of the prompt, as in `prefix_index.py`."""
    emitted: list[int] = field(default_factory=list)
    """The token log: what it has generated."""
    place: Literal["waiting", "prefill", "held", "domain"] = "waiting"
    attempt: str = ""
    """Id of the request at the worker that has it."""
    worker: "Worker | None" = None
    prefill: "Worker | None" = None
    """Who computes or holds its pages, from `prefill` until its first token."""
    prefill_attempt: str = ""
    source: PagesSource | None = None
    asked: bool = False
    """Whether its domain was asked to give it back, as another has a free slot."""
    direct: bool = False
    """Whether its prompt has no page to hold, as a prefill worker found."""
    cost: float = 0.0
    """Cost of the prompt for the prefill worker, in tokens."""
    promised: int = 0
    """Tokens that it will take of its domain's cache, by estimate."""
    renew_at: float = 0.0
    weights: str = ""
    """Digest of the weights that the request began with; empty: any worker may run it."""
    lost: int = 0
    """Workers that it has lost."""
    placed_at: float = 0.0
    computed_at: float | None = None
    """When a prefill worker had its prompt computed."""
    found: int | None = None
    """Tokens that the prefill worker which computed its prompt had in its prefix cache; None: the
    domain computes the prompt."""
    waited: float = 0.0
    """Seconds in which no worker had it, or its pages were held."""
    last_at: float | None = None
    """When its last tokens came."""

    @property
    def tokens(self) -> list[int]:
        """Prompt and token log."""
        return self.job.prompt + self.emitted

    def cached(self, output: TokenOutput) -> int:
        """Tokens of its prompt that nobody had to compute, by the domain's first output.

        What a prefill worker has computed for it is in the domain's prefix cache, too, so there
        the prefill worker's count is the one.
        """
        cached = output.cached_tokens if self.found is None else self.found
        return min(cached, len(self.job.prompt))

    def queued(self, output: TokenOutput) -> float:
        """Seconds that it waited for workers, by the domain's first output."""
        return self.waited + output.queue_seconds


@dataclass(eq=False, slots=True)
class Worker:
    """A worker that is connected."""

    name: str
    facts: WorkerFacts
    reserved: bool = False
    """Whether it takes long prompts only."""
    requests: dict[str, Routed] = field(default_factory=dict)
    """Attempt → this router's requests that it has: of a prefill worker those it holds, too."""
    load: EngineLoad = field(default_factory=EngineLoad)
    others: int = 0
    """Requests of other routers, by its last state."""
    why: str = ""
    """Why the worker gets nothing new: silent, its step loop stands still, not ready; or empty."""
    drain: DrainMode = ""
    """Whether it takes nothing new, and what its requests are to do."""
    orphans: dict[str, str] = field(default_factory=dict)
    """Requests whose router is gone: id → attempt."""
    full_until: float = 0.0
    """Time until which the worker is not asked again: it had no room."""
    work: float = 0.0
    """Prefill worker: cost of the prompts that it has not computed yet."""
    promised: int = 0
    """Domain: tokens of the cache that its requests will take."""
    speed: float = 0.0
    """Prefill worker: cost a second; 0: not known yet."""
    busy_since: float = 0.0
    """Prefill worker: when it finished a prompt last, or began after it had none."""
    pace: float = 0.0
    """Domain: seconds between the tokens of a request; 0: not known yet."""
    handed: int = 0
    """Prefill worker: tokens whose pages it has handed over."""

    @property
    def suspect(self) -> bool:
        """Whether it gets nothing new."""
        return bool(self.why)

    def reaches(self, address: str) -> bool:
        """Returns False while the domain leaves the prefill worker at an address alone."""
        pages = self.load.hand_offs
        return pages is None or address not in pages.timed_out

    @property
    def count(self) -> int:
        """Requests that it has, of all routers."""
        return self.others + len(self.requests)
