"""Which domain of a runtime takes a request in (xDeepServe §4.3).

Called by the engine's thread for every new request. A request stays with the domain that it was
given to: its pages are there.
"""

from collections.abc import Sequence

from jaxserve.engine.request import Request
from jaxserve.engine.scheduler import Scheduler


def choose_domain(schedulers: Sequence[Scheduler], request: Request) -> int:
    """The domain with the most room.

    One that has a slot and pages now, of several the one where that costs least: the pages in use
    and those to be computed, so a domain whose prefix cache has the prompt's beginning is cheap.
    Where all would have to let it wait, the one with the fewest requests, the waiting ones first.
    """
    if len(schedulers) == 1:
        return 0

    def room(domain: int) -> tuple[bool, int, int, int]:
        scheduler = schedulers[domain]
        cost = scheduler.cost(request)
        return cost is None, scheduler.num_waiting, cost or 0, scheduler.num_running

    return min(range(len(schedulers)), key=room)
