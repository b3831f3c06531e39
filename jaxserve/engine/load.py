"""The load of an engine, as metrics and status pages show it.

Made by the engine, read by the server, from any thread; the numbers need not be of one moment.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from jaxserve.engine.drafting import DraftCounts

COUNTERS = (
    *("preemptions", "prefix_queries", "prefix_hits"),
    *("invalid_logits", "recomputed", "quarantined"),
)
"""Figures of domains, and of engines, that add up."""


FETCHED = ("transfers", "bytes", "failures", "corrupt", "queued", "wait_seconds")
"""Figures of pages clients that add up."""


def summed(loads: Sequence[object], names: Iterable[str]) -> dict[str, Any]:
    """The sums of figures over several loads, by name."""
    return {name: sum(getattr(load, name) for load in loads) for name in names}


class PagesLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's end of the pages link, since its start.

    Attributes:
      transfers: hand-offs that came, or were taken, whole.
      bytes: of these hand-offs.
      failures: hand-offs that did not come, or could not be given.
      corrupt: on a domain, pieces whose checksum was wrong, and which were fetched again.
      queued: hand-offs that have not ended; now.
      wait_seconds: on a domain, from the order of a hand-off to its last piece, summed.
      expired: on a prefill worker, leases that ran out.
      registered_bytes: on a prefill worker, of pieces that wait to be pulled; now.
      timed_out: on a domain, address of each prefill worker that it leaves alone for a while → why.
    """

    transfers: int = 0
    bytes: int = 0
    failures: int = 0
    corrupt: int = 0
    queued: int = 0
    wait_seconds: float = 0.0
    expired: int = 0
    registered_bytes: int = 0
    timed_out: dict[str, str] = {}


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of a fleet, by what it said last.

    Attributes:
      name: its address.
      role: "prefill" or "domain".
      status: "ready", "suspect" (it is silent, or its step loop does not go round), "draining",
        "drained" or "absent".
      why: it is not ready, in words.
      running, waiting, kv_usage: as of `EngineLoad`.
      held: requests whose pages it keeps for a domain.
      routed: this router's requests that it has.
      pages_tokens: tokens whose pages it has handed over for this router, since it is there.
      hand_offs: what its end of the pages link has done; None: it has none.
    """

    name: str
    role: str
    status: str
    why: str = ""
    running: int = 0
    waiting: int = 0
    held: int = 0
    kv_usage: list[float] = []
    routed: int = 0
    pages_tokens: int = 0
    hand_offs: PagesLoad | None = None


class DomainLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One domain's part of an `EngineLoad`."""

    running: int = 0
    waiting: int = 0
    kv_usage: list[float] = []
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    invalid_logits: int = 0
    recomputed: int = 0
    quarantined: int = 0
    drafts: DraftCounts | None = None


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges of the moment, and counters since the start.

    Attributes:
      running: sequences that get steps.
      waiting: requests that wait for pages and a slot.
      kv_usage: the part of its pages that each DP group uses, 0 … 1, domain after domain.
      page_size: tokens a page.
      pages: pages a DP group.
      preemptions: how often a sequence lost its pages to another.
      prefix_queries: tokens of prompts that were looked for in the prefix cache.
      prefix_hits: those that were found.
      invalid_logits: requests that ended because their logits were not finite numbers.
      recomputed: requests that were computed anew on other pages because of that.
      quarantined: pages that are kept away because of that; now.
      compilations: programs that the step loop had to wait for; more than 0 is a flaw.
      prompts: of a prefill worker, those that the engine has not got yet; of a fleet, all that are
        not computed yet.
      held: of a prefill worker, requests whose pages are kept for a domain.
      slots: sequences that may get steps at a time.
      workers: of a fleet.
      replays: of a fleet, how often a request went on elsewhere because its worker was lost.
      moves: of a fleet, how often a request went on elsewhere because its worker drains.
      refusals: of a fleet, requests that found no room, or whose targets could not be met.
      domains: those of the figures that each domain has of its own.
      hand_offs: what its end of the pages link has done; of a fleet, what all have; None: there is
        none.
      drafts: of all domains together; None: there are none.
      problems: what is wrong with workers that this one needs, in words; now.
      losses: of a fleet, role → cause → how often a worker was lost or suspect because of it.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: list[float] = []
    page_size: int = 0
    pages: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    invalid_logits: int = 0
    recomputed: int = 0
    quarantined: int = 0
    compilations: int = 0
    prompts: int = 0
    held: int = 0
    slots: int = 0
    workers: list[WorkerLoad] = []
    replays: int = 0
    moves: int = 0
    refusals: int = 0
    domains: list[DomainLoad] = []
    hand_offs: PagesLoad | None = None
    drafts: DraftCounts | None = None
    problems: list[str] = []
    losses: dict[str, dict[str, int]] = {}

    @classmethod
    def of(
        cls,
        domains: Sequence[DomainLoad],
        *,
        queued: int,
        slots: int = 0,
        page_size: int,
        pages: int,
        compilations: int,
        held: int = 0,
        hand_offs: PagesLoad | None = None,
        problems: Sequence[str] = (),
    ) -> "EngineLoad":
        """Adds the loads of all domains up.

        Args:
          queued: requests that wait to be given to a domain.
        """
        timed_out = hand_offs.timed_out if hand_offs else {}
        pages_late = [f"pages of {address}: {why}" for address, why in timed_out.items()]
        return cls(
            **summed(domains, ("running", *COUNTERS)),
            waiting=sum(domain.waiting for domain in domains) + queued,
            kv_usage=[usage for domain in domains for usage in domain.kv_usage],
            slots=slots,
            page_size=page_size,
            pages=pages,
            compilations=compilations,
            held=held,
            domains=list(domains),
            hand_offs=hand_offs,
            problems=[*problems, *pages_late],
            drafts=DraftCounts.sum([one.drafts for one in domains if one.drafts is not None]),
        )
