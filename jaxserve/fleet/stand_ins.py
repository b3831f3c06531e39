"""Has workers change their role, so that a fleet keeps the domains that it should have.

Without domains nothing is generated; without prefill workers prompts are only computed more slowly
(kill P to preserve D, xDeepServe §6.2). If fewer domains than `fleet.least_domains`, or than an
operator asked for (`StandIns.want`), are connected for `fleet.stand_in_seconds`, a prefill worker
is told to start its process again as a domain. Once there are more domains than that, those that
stand in are told to go back. Workers that were started as domains become prefill workers only
where a number was asked for. A domain goes only when all routers connected to it agree
(`worker_port.py`), because routers may see different workers. Called by `router.py`, which sends
the orders; the worker's side is `commands/serving.py`. Pure, with the router's clock.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jaxserve.config.deployment import Deployment
from jaxserve.errors import ConfigError
from jaxserve.fleet.registry import Place
from jaxserve.fleet.routed import Worker

ASK_AGAIN_SECONDS = 10.0
"""Seconds until a worker that has not changed its role is told again."""


class Order(NamedTuple):
    """Tells a worker to start again in another role."""

    worker: str
    domain: bool
    """True: as a domain; False: as a prefill worker."""
    why: str
    hurry: bool
    """Whether the fleet has fewer domains than `fleet.least_domains`."""


class StandIns:
    """Decides for one router. Routers that see the same workers decide alike.

    It acts only after it has seen enough domains together, so not while a fleet starts.

    Args:
      deployment: sections `fleet`, `pages` and `cluster`.
      clock: seconds, monotonic.
    """

    def __init__(self, deployment: Deployment, clock: Callable[[], float]):
        self._least, self._wanted = deployment.fleet.least_domains, 0
        self._rebalances = deployment.fleet.rebalance_roles
        self._patience = deployment.fleet.stand_in_seconds
        self._start_seconds = deployment.cluster.start_seconds
        pages = deployment.pages
        self._recomputes = pages.on_failure == "recompute" and not pages.recompute_tokens
        self._clock = clock
        self._complete = False
        self._fewer_since: float | None = None
        self._told: dict[str, tuple[bool, float]] = {}  # worker → what, and when

    def want(self, domains: int, workers: int) -> None:
        """Sets how many of the fleet's workers are to be domains, at least `fleet.least_domains`.

        Raises:
          ConfigError: roles must not change (`fleet.rebalance_roles`), or one would have no worker.
        """
        if not self._rebalances:
            raise ConfigError("fleet.rebalance_roles = false: workers keep their roles")
        if not 0 < domains < workers:
            raise ConfigError(f"{domains} domains of {workers} workers: each role keeps one worker")
        self._wanted, self._complete = domains, True

    def changes(self, worker: Worker) -> None:
        """Notes that a worker is about to change its role, whichever router has told it."""
        self._told.setdefault(worker.name, (worker.facts.role == "prefill", self._clock()))

    def decide(self, places: Sequence[Place], workers: Mapping[str, Worker]) -> list[Order]:
        """Returns the orders that are due now.

        Args:
          places: places of all workers of the fleet, in order.
          workers: the connected ones, by address.
        """
        goal = max(self._least, self._wanted)
        if not goal:
            return []
        whose = "fleet.least_domains" if goal == self._least else "POST /roles/domains"
        now = self._clock()
        there = [workers[place.address] for place in places if place.address in workers]
        domains = [w for w in there if w.facts.role == "domain"]
        for worker in there:
            if self._told.get(worker.name, (None,))[0] == (worker.facts.role == "domain"):
                del self._told[worker.name]
        if (surplus := len(domains) - goal) >= 0:
            self._complete, self._fewer_since = True, None
            able = [w for w in domains if w.facts.stands_in]
            able += [w for w in domains if w not in able and self._wanted and w.facts.can_stand_in]
            why = f"{goal} domains are there without it ({whose})"
            return self._orders([w.name for w in able[:surplus]], False, why)
        prefills = [w for w in there if w.facts.role == "prefill"]
        coming = self._coming(now, {w.name for w in prefills if not w.drain})
        lacking = -surplus - len(coming)
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
        why = f"{len(domains)} domains were there for {seconds:.1f} s, of {goal} ({whose})"
        hurry = len(domains) < self._least
        return self._orders([w.name for w in able[::-1][:most]], True, why, hurry)

    def _coming(self, now: float, unchanged: set[str]) -> set[str]:
        """Returns workers that were told to become domains and had no time for it yet. Some of the
        unchanged may not have received the order."""
        limits = (self._start_seconds, ASK_AGAIN_SECONDS)
        return {
            name
            for name, (domain, when) in self._told.items()
            if domain and now - when < limits[name in unchanged]
        }

    def _orders(
        self, names: Sequence[str], domain: bool, why: str, hurry: bool = False
    ) -> list[Order]:
        """Returns orders for the workers that did not get the same one just now."""
        now, orders = self._clock(), []
        for name in names:
            known = self._told.get(name)
            if known is None or known[0] != domain or now - known[1] >= ASK_AGAIN_SECONDS:
                self._told[name] = domain, now
                orders.append(Order(name, domain, why, hurry))
        return orders
