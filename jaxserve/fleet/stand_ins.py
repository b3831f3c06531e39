"""Turns prefill workers into domains while some are lost: kill P to preserve D (xDeepServe §6.2).

Without domains nothing is generated; without prefill workers prompts are only computed more slowly.
If fewer than `fleet.least_domains` domains are connected for `fleet.stand_in_seconds`, a prefill
worker is told to start its process again as a domain. Once there are enough domains without it, it
is told to go back. It does so only when all routers connected to it agree (`worker_port.py`),
because routers may see different workers. Called by `router.py`, which sends the orders; the
worker's side is `commands/serving.py`. Pure, with the router's clock.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jaxserve.config.deployment import Deployment
from jaxserve.fleet.registry import Place
from jaxserve.fleet.routed import Worker

ASK_AGAIN_SECONDS = 10.0
"""Seconds until a worker that has not changed its role is told again."""


class Order(NamedTuple):
    """Tells a worker to start again in another role."""

    worker: str
    domain: bool
    """True: as a domain; False: as the prefill worker that it was started as."""
    why: str


class StandIns:
    """Decides for one router. Routers that see the same workers decide alike.

    It acts only after it has seen enough domains together, so not while a fleet starts.

    Args:
      deployment: sections `fleet`, `pages` and `cluster`.
      clock: seconds, monotonic.
    """

    def __init__(self, deployment: Deployment, clock: Callable[[], float]):
        self._least = deployment.fleet.least_domains
        self._patience = deployment.fleet.stand_in_seconds
        self._start_seconds = deployment.cluster.start_seconds
        pages = deployment.pages
        self._recomputes = pages.on_failure == "recompute" and not pages.recompute_tokens
        self._clock = clock
        self._complete = False
        self._fewer_since: float | None = None
        self._told: dict[str, tuple[bool, float]] = {}  # worker → what, and when

    def decide(self, places: Sequence[Place], workers: Mapping[str, Worker]) -> list[Order]:
        """Returns the orders that are due now.

        Args:
          places: places of all workers of the fleet, in order.
          workers: the connected ones, by address.
        """
        if not self._least:
            return []
        now = self._clock()
        there = [workers[place.address] for place in places if place.address in workers]
        domains = [w for w in there if w.facts.role == "domain"]
        stand_ins = [w for w in domains if w.facts.stands_in]
        for worker in stand_ins:
            if self._told.get(worker.name, (False, 0.0))[0]:
                del self._told[worker.name]
        if len(domains) - len(stand_ins) >= self._least:
            self._complete, self._fewer_since = True, None
            surplus = len(domains) - self._least
            why = f"{self._least} domains are there without it (fleet.least_domains)"
            return self._orders([w.name for w in stand_ins[:surplus]], False, why)
        prefills = [w for w in there if w.facts.role == "prefill"]
        coming = self._coming(now, {w.name for w in prefills if not w.drain})
        lacking = self._least - len(domains) - len(coming)
        if lacking <= 0 or not self._complete:
            self._fewer_since = None
            return []
        if self._fewer_since is None:
            self._fewer_since = now
        seconds = now - self._fewer_since
        if seconds < self._patience:
            return []
        free = [w for w in prefills if not (w.drain or w.suspect or w.name in coming)]
        able = [w for w in free if w.facts.can_stand_in]
        able.sort(key=lambda worker: not worker.reserved)  # the last one of the others goes first
        kept = 0 if self._recomputes and not domains and not coming else 1
        most = max(0, min(lacking, len(free) - kept))
        why = (
            f"{len(domains)} domains were there for {seconds:.1f} s, of {self._least} "
            "(fleet.least_domains)"
        )
        return self._orders([w.name for w in able[::-1][:most]], True, why)

    def _coming(self, now: float, unchanged: set[str]) -> set[str]:
        """Returns workers that were told to become domains and had no time for it yet. Some of the
        unchanged may not have received the order."""
        limits = (self._start_seconds, ASK_AGAIN_SECONDS)
        return {
            name
            for name, (domain, when) in self._told.items()
            if domain and now - when < limits[name in unchanged]
        }

    def _orders(self, names: Sequence[str], domain: bool, why: str) -> list[Order]:
        """Returns orders for the workers that did not get the same one just now."""
        now, orders = self._clock(), []
        for name in names:
            known = self._told.get(name)
            if known is None or known[0] != domain or now - known[1] >= ASK_AGAIN_SECONDS:
                self._told[name] = domain, now
                orders.append(Order(name, domain, why))
        return orders
