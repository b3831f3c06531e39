"""The load of engines and fleets: current gauges, and counters since the start.

An engine makes its load; the server reads it from any thread, and workers send it to routers. The
numbers of a load need not belong to one moment.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from jaxserve.link.pages.source import PagesLoad

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


class DraftCounts(msgspec.Struct, kw_only=True):
    """Drafts since the start.

    Attributes:
      runs: how often drafts of a sequence were verified; each gave one token more than drafts held.
      drafted: drafts that were verified.
      accepted: drafts that held, by their place in a run, the first place first.
    """

    runs: int = 0
    drafted: int = 0
    accepted: list[int] = []

    def add(self, drafts: np.ndarray, accepted: np.ndarray) -> None:
        """Counts a step.

        Args:
          drafts: drafts of each of the step's rows.
          accepted: drafts that held, by row.
        """
        self.runs += int((drafts > 0).sum())
        self.drafted += int(drafts.sum())
        most = int(drafts.max(initial=0))
        self.accepted += [0] * (most - len(self.accepted))
        for place in range(most):
            self.accepted[place] += int((accepted > place).sum())

    @classmethod
    def sum(cls, parts: Sequence["DraftCounts"]) -> "DraftCounts | None":
        """Adds up several counts; returns None for an empty list."""
        if not parts:
            return None
        places = itertools.zip_longest(*(part.accepted for part in parts), fillvalue=0)
        return cls(
            runs=sum(part.runs for part in parts),
            drafted=sum(part.drafted for part in parts),
            accepted=[sum(place) for place in places],
        )


class DomainLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load of one domain: current gauges, and counters since the start.

    Attributes:
      running: sequences that get steps.
      waiting: requests that wait for pages and a slot.
      kv_usage: part of its pages that each DP group uses, 0 … 1.
      preemptions: how often a sequence lost its pages to another.
      prefix_queries: prompt tokens that were looked up in the prefix cache.
      prefix_hits: prompt tokens that were found there.
      invalid_logits: requests that ended because their logits were not finite numbers.
      recomputed: requests that were computed anew on other pages because of that.
      quarantined: pages that are kept away now because of that.
      drafts: drafts that were verified; None: the deployment has no drafts.
    """

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


class EngineLoad(DomainLoad, frozen=True, kw_only=True):
    """Load of an engine or a fleet: the sums of its domains, and more.

    Attributes:
      page_size: tokens a page.
      pages: pages a DP group.
      compilations: programs that the step loop had to wait for; more than 0 is a flaw.
      prompts: of a prefill worker, those that the engine has not got yet; of a fleet, all that are
        not computed yet.
      held: of a prefill worker, requests whose pages are kept for a domain.
      slots: sequences that may get steps at a time.
      workers: of a fleet.
      replays: of a fleet, how often a request went on elsewhere because its worker was lost.
      moves: of a fleet, how often a request went on elsewhere because its worker drains, or because
        it has grown too long for it (`fleet.long_tokens`).
      refusals: of a fleet, requests that found no room, or whose targets could not be met.
      domains: the figures of each domain.
      hand_offs: counters of the pages link's end; in a fleet the sum of all ends; None: no link.
      host_pages: counters of KV pages in host memory, by name; empty without `cache.host_gb`.
      problems: current problems of workers that this one needs, in words.
      losses: of a fleet, role → cause → how often a worker was lost or suspect because of it.
    """

    page_size: int = 0
    pages: int = 0
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
    host_pages: dict[str, float] = {}
    problems: list[str] = []
    losses: dict[str, dict[str, int]] = {}

    @classmethod
    def of(
        cls,
        domains: Sequence[DomainLoad],
        *,
        queued: int,
        hand_offs: PagesLoad | None = None,
        problems: Sequence[str] = (),
        **others: Any,
    ) -> "EngineLoad":
        """Adds the loads of all domains up.

        Args:
          queued: requests that wait to be given to a domain.
          others: further fields, as they are.
        """
        timed_out = hand_offs.timed_out if hand_offs else {}
        pages_late = [f"pages of {address}: {why}" for address, why in timed_out.items()]
        return cls(
            **summed(domains, ("running", *COUNTERS)),
            waiting=sum(domain.waiting for domain in domains) + queued,
            kv_usage=[usage for domain in domains for usage in domain.kv_usage],
            domains=list(domains),
            hand_offs=hand_offs,
            problems=[*problems, *pages_late],
            drafts=DraftCounts.sum([one.drafts for one in domains if one.drafts is not None]),
            **others,
        )
