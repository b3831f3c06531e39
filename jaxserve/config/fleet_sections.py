"""The sections of a deployment file about several workers, and what they give each other."""

from typing import Annotated, Any, Literal

from msgspec import Meta

from jaxserve.config.sections import Seconds, Section, Size


class Prefill(Section, frozen=True):
    """Prefill workers, which run prompts and hand their KV pages over to the domains."""

    workers: Annotated[int, Meta(ge=0, le=65536)] = 0
    """Prefill workers; 0: the domains prefill."""
    long_workers: Annotated[int, Meta(ge=0, le=65536)] = 0
    """Number of prefill workers, the last ones, that take prompts of `prefill.long_tokens` or more;
    such prompts go to no other."""
    long_tokens: Annotated[int, Meta(ge=0, le=2**24)] = 0
    """Tokens, without those that a prefix cache has, from which on a prompt is a long one. 0: no
    prompt is."""
    mode: Literal["", "afd", "colocated"] = ""
    """Mode of prefill workers; empty: that of the rest of the file."""
    lanes: Annotated[int, Meta(ge=0, le=4)] = 0
    """Lanes of prefill workers; 0: those of the rest of the file."""
    attention: dict[str, Any] = {}
    """Keys of `attention` that differ on prefill workers."""
    ffn: dict[str, Any] = {}
    """Keys of `ffn` that differ on prefill workers."""
    link: dict[str, Any] = {}
    """Keys of `link` that differ on prefill workers."""
    cache: dict[str, Any] = {}
    """Keys of `cache` that differ on prefill workers."""
    scheduler: dict[str, Any] = {}
    """Keys of `scheduler` that differ on prefill workers."""


class PeerWeights(Section, frozen=True):
    """Weights from running workers instead of storage, for workers that start."""

    peers: list[str] = []
    """Where running workers serve their weights, host:port, in order of preference; a name may
    stand for several. A worker that starts takes every array from the first that has it in the
    wanted format, and from the checkpoint what none of them has, or gives to its end."""
    address: str = ""
    """Where this worker serves its own, read-only, host:port; it needs the cluster's token where
    other hosts reach it. Empty: it does not."""
    serve_mb_per_second: Annotated[float, Meta(ge=1, le=1e6)] = 1000.0
    """Most that it sends, in 10^6 bytes a second, to all together: so that its steps are not
    disturbed."""


class Pages(Section, frozen=True):
    """The hand-off of KV pages from prefill workers to domains."""

    listen: str = ""
    """Where a prefill worker listens for domains, host:port; empty: on the host of its own address,
    at a port that is free. Each has its own, so of several on a host it is set by command."""
    address: str = ""
    """Where domains reach it, if not where it listens: host:port of what stands before it."""
    lease_seconds: Seconds = 30.0
    """How long a prefill worker keeps pages without a renewal of their lease; decode workers renew
    it three times as often."""
    on_failure: Literal["recompute", "fail"] = "recompute"
    """Action for a request whose pages did not arrive: `recompute` its prompt in the domain, or
    `fail`, so that the router prefills it once more."""
    recompute_tokens: Annotated[int, Meta(ge=0, le=2**24)] = 0
    """Most tokens of a prompt that a domain recomputes; requests that need more fail. 0: any."""
    held: Size = 64
    """Requests whose pages a prefill worker keeps at a time; further prompts wait."""
    step_tokens: Annotated[int, Meta(ge=0, le=2**24)] = 1024
    """Tokens whose entries a domain writes into its pages between two steps, in whole pieces: fewer
    disturb running requests less, and let new ones wait longer. 0: any."""
    checksums: bool = True
    """Whether a prefill worker sends checksums with pages. They cost some 5 ms of CPU at either end
    for 64 MiB, about a tenth of the hand-off. Without them a bit that changes in a host's memory or
    passes TCP's 16-bit checksum gives wrong tokens without an error."""
    streams: Annotated[int, Meta(ge=1, le=64)] = 2
    """Hand-offs at a time from one prefill worker to a domain, each over its own connection."""


class Fleet(Section, frozen=True):
    """The router, and where it finds the workers."""

    prefill: list[str] = []
    """Where the prefill workers listen for routers, host:port, in their order."""
    domains: list[str] = []
    """Where the domains listen for routers, host:port, in their order."""
    registry: Literal["static", "kubernetes"] = "static"
    """`static`: a worker an address; `kubernetes`: each is the name of a headless Service, whose
    ready pods are the workers, looked up again all the time. A registry that does not answer
    changes nothing."""
    prefill_waiting: Annotated[int, Meta(ge=1, le=2**20)] = 64
    """Requests that a prefill worker may have to run; new ones are refused when all have so
    many."""
    domain_waiting: Annotated[int, Meta(ge=0, le=2**20)] = 8
    """Requests that may wait at a domain for a slot and pages, until another domain has both;
    further ones stay at their prefill worker, which keeps their pages (`pages.held`), or, without
    prefill workers, at the router, up to `prefill_waiting`."""
    long_domains: Annotated[int, Meta(ge=0, le=65536)] = 0
    """Number of domains, the last ones, that take sequences of `fleet.long_tokens` or more; others
    go to no such domain. A step lasts as long as its longest sequences take."""
    long_tokens: Annotated[int, Meta(ge=0, le=2**24)] = 0
    """Tokens of prompt and output from which on a sequence is a long one. One that becomes so
    begins again at a domain for long ones with a free slot, from its tokens. 0: none is."""
    replay: Literal["same_weights", "any_weights"] = "same_weights"
    """Where a request goes on whose domain is lost or drains, when it has tokens already: on
    workers with the weights that it began with, or, while weights are replaced, on any."""
    attempts: Annotated[int, Meta(ge=1, le=100)] = 3
    """Workers that a request may lose before it fails."""
    resume_seconds: Annotated[float, Meta(ge=0, le=86400)] = 30.0
    """How long a domain goes on with a request whose router is gone, and keeps its tokens, where
    the client has sent an `Idempotency-Key`, with which it may come back through any router. 0: it
    is cancelled."""
    absent_seconds: Seconds = 60.0
    """How long a request waits while no worker is there that could run it: none of the role, or
    none with the weights that it began with."""
    ttft_seconds: Annotated[float, Meta(ge=0, le=86400)] = 0.0
    """Target for the time to the first token; 0: none."""
    tpot_seconds: Annotated[float, Meta(ge=0, le=86400)] = 0.0
    """Target for the time per output token; 0: none."""
    least_domains: Annotated[int, Meta(ge=0, le=65536)] = 0
    """When fewer domains are there for `stand_in_seconds`, a prefill worker of one process starts
    again as a domain, on its devices, until enough are there without it. One prefill worker is
    left, unless no domain is and domains may compute prompts themselves. 0: none does."""
    stand_in_seconds: Seconds = 10.0
    """Seconds for which domains have to be missing: longer than the restart of a domain takes."""
    rebalance_roles: bool = False
    """Whether `POST /roles/domains` on a router's admin port, which `plan verify --act` sends, may
    turn prefill workers of one process into domains, and domains into prefill workers."""
    late: Literal["queue", "refuse"] = "queue"
    """Action for a request whose targets cannot be met, by estimate: it waits its turn, or is
    refused with the estimate."""
