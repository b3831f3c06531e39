"""Load of a fleet's workers, each and all together, for metrics and the status page."""

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from jaxserve.fleet.coordinator import Coordinator
from jaxserve.fleet.registry import Place
from jaxserve.fleet.routed import Worker
from jaxserve.link.pages.source import PagesLoad
from jaxserve.observe.load import COUNTERS, FETCHED, EngineLoad, WorkerLoad, summed


def worker_status(worker: Worker) -> str:
    """Status of a connected worker: "ready"; "suspect" (its step loop is stuck); "draining"; or
    "drained" (it has no request left)."""
    if not worker.drain:
        return "suspect" if worker.suspect else "ready"
    load = worker.load
    left = worker.count + load.running + load.waiting + load.prompts + load.held
    return "draining" if left else "drained"


def fleet_load(
    coordinator: Coordinator,
    places: Sequence[Place],
    absences: Mapping[str, str] = MappingProxyType({}),
    losses: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
) -> EngineLoad:
    """Returns the load of all connected workers, and lists the others as absent.

    Args:
      absences: address → why no worker is connected there.
      losses: role → cause → workers that were lost.
    """
    workers, placement = [], coordinator.placement
    problems = []
    numbers: Counter[str] = Counter()
    for place in places:
        worker = placement.workers.get(place.address)
        whose = f"{place.role} worker {numbers[place.role]}"
        numbers[place.role] += 1
        load = EngineLoad() if worker is None else worker.load
        why = absences.get(place.address, "it has not joined") if worker is None else worker.why
        problems += [f"{whose}: {what}" for what in (why, *load.problems) if what]
        workers.append(
            WorkerLoad(
                name=place.address,
                role=place.role if worker is None else worker.facts.role,
                status="absent" if worker is None else worker_status(worker),
                why=why,
                running=load.running,
                waiting=load.waiting + load.prompts,
                held=load.held,
                kv_usage=load.kv_usage,
                routed=0 if worker is None else len(worker.requests),
                pages_tokens=0 if worker is None else worker.handed,
                hand_offs=load.hand_offs,
            )
        )
    takers = placement.of("domain")
    domains = [worker.load for worker in takers]
    # A domain's count is as old as its last state; requests sent since then wait, too.
    waiting = sum(max(one.load.waiting, one.count - one.facts.slots) for one in takers)
    prefills = [worker.load for worker in placement.of("prefill")]
    everyone = [*domains, *prefills]
    first = domains[0] if domains else EngineLoad()
    return EngineLoad(
        **summed(domains, ("running",)),
        **summed(everyone, (*COUNTERS, "compilations")),
        waiting=coordinator.waiting + waiting,
        slots=sum(worker.facts.slots for worker in takers),
        kv_usage=[usage for load in domains for usage in load.kv_usage],
        page_size=first.page_size,
        pages=first.pages,
        prompts=sum(load.running + load.waiting + load.prompts for load in prefills),
        held=sum(load.held for load in prefills),
        workers=workers,
        hand_offs=_hand_offs(domains, prefills),
        host_pages=_added_up([load.host_pages for load in everyone]),
        replays=coordinator.replays,
        moves=coordinator.moves,
        refusals=coordinator.refusals,
        problems=problems,
        losses={role: dict(causes) for role, causes in dict(losses).items()},
    )


def _added_up(counters: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(one.get(name, 0) for one in counters) for each in counters for name in each}


def _hand_offs(domains: Sequence[EngineLoad], prefills: Sequence[EngineLoad]) -> PagesLoad | None:
    """Sums the pages link's counters: fetches of domains, leases of prefill workers."""
    fetched = [load.hand_offs for load in domains if load.hand_offs is not None]
    given = [load.hand_offs for load in prefills if load.hand_offs is not None]
    if not fetched and not given:
        return None
    return PagesLoad(**summed(fetched, FETCHED), **summed(given, ("expired", "registered_bytes")))
