"""What metrics and the page show of a fleet: the load of each worker, and of all together."""

from collections.abc import Sequence

from jaxserve.engine.load import EngineLoad, WorkerLoad
from jaxserve.fleet.coordinator import Coordinator
from jaxserve.fleet.registry import Place


def fleet_load(coordinator: Coordinator, places: Sequence[Place]) -> EngineLoad:
    """Of the workers that are connected; those that are not are listed as absent."""
    workers, placement = [], coordinator.placement
    for place in places:
        worker = placement.workers.get(place.address)
        if worker is None:
            workers.append(WorkerLoad(name=place.address, role=place.role, status="absent"))
            continue
        load = worker.load
        workers.append(
            WorkerLoad(
                name=place.address,
                role=place.role,
                status="suspect" if worker.suspect else "ready",
                running=load.running,
                waiting=load.waiting + load.prompts,
                held=load.held,
                kv_usage=load.kv_usage,
                routed=len(worker.requests),
                pages_tokens=worker.handed,
            )
        )
    domains = [worker.load for worker in placement.of("domain")]
    prefills = [worker.load for worker in placement.of("prefill")]
    everyone = [*domains, *prefills]
    first = domains[0] if domains else EngineLoad()
    return EngineLoad(
        running=sum(load.running for load in domains),
        waiting=coordinator.waiting + sum(load.waiting for load in domains),
        kv_usage=[usage for load in domains for usage in load.kv_usage],
        page_size=first.page_size,
        pages=first.pages,
        preemptions=sum(load.preemptions for load in domains),
        prefix_queries=sum(load.prefix_queries for load in everyone),
        prefix_hits=sum(load.prefix_hits for load in everyone),
        invalid_logits=sum(load.invalid_logits for load in everyone),
        compilations=sum(load.compilations for load in everyone),
        prompts=sum(load.running + load.waiting + load.prompts for load in prefills),
        held=sum(load.held for load in prefills),
        workers=workers,
        replays=coordinator.replays,
        refusals=coordinator.refusals,
    )
