"""Carries out the advice of `plan verify --act`: workers of a running fleet change their role.

This asks the first router for the fleet's workers, and tells every router how many domains the
fleet should have (`POST /roles/domains`, `fleet/stand_ins.py`). It acts only while all workers are
ready, so one change is over before the next begins.
"""

import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from jaxserve.config.deployment import Deployment
from jaxserve.config.load import deployment_of
from jaxserve.errors import ConfigError
from jaxserve.planner.balance import Advice, Requests, next_workers

RECENT = 15
"""Checks whose median is the advice for a running fleet."""
SECONDS = 10.0
"""Time for a router's answer."""


class _Worker(msgspec.Struct):
    """The part of a `WorkerStatus` that is used here."""

    role: str
    status: str
    routed: int
    others: int


class _Roles(msgspec.Struct):
    workers: list[_Worker]


class Roles:
    """The attention workers that a running fleet has, and should have.

    Args:
      routers: addresses of the admin ports of all routers, as http://host:8002; empty: the fleet is
        as its deployment says, and nobody acts.
      deployment: of the fleet.
    """

    def __init__(self, routers: Sequence[str], deployment: Deployment):
        self._routers, self._planned = routers, deployment.domains
        parts = {role: deployment_of(deployment, role) for role in ("domain", "prefill")}
        self._slots = {
            role: one.runtime_domains * one.attention.dp * one.lanes * one.scheduler.slots
            for role, one in parts.items()
        }
        self._recent = deque[Advice](maxlen=RECENT)
        self._wanted = 0

    def settled(self, advised: Callable[[int, float], Advice]) -> Advice:
        """Returns the median of the latest advices, and has the routers act on it.

        Args:
          advised: as `verify.Checked.advice`, for the present check.

        Raises:
          ConfigError: a router does not answer, or refuses (`fleet.rebalance_roles`).
        """
        workers = _call(self._routers[0]).workers if self._routers else []
        domains, prefills = (self._requests(workers, role) for role in ("domain", "prefill"))
        one = advised(domains.workers if workers else self._planned, 1.0)
        if any(worker.status != "ready" for worker in workers):
            self._recent.clear()
        if self._recent and self._recent[-1].workers != one.workers:
            self._recent.clear()
        self._recent.append(one)
        found = Advice.settled(self._recent)
        if workers and len(self._recent) == RECENT:
            wanted = next_workers(found, advised, domains, prefills)
            self._wanted = wanted if wanted != found.workers else self._wanted
        for router in self._routers if self._wanted else ():
            _call(router, self._wanted)
        return found

    def _requests(self, workers: Sequence[_Worker], role: str) -> Requests:
        own = [worker for worker in workers if worker.role == role]
        held = sum(each.routed + each.others for each in own)
        return Requests(len(own), held, self._slots[role])


def _call(router: str, domains: int | None = None) -> _Roles:
    """Asks a router for its workers, or for a number of domains, too.

    Raises:
      ConfigError: it refuses, or does not answer in time.
    """
    url, body = f"{router.rstrip('/')}/roles", None
    if domains is not None:
        url, body = f"{url}/domains", msgspec.json.encode({"domains": domains})
    asked = urllib.request.Request(url, body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
            return msgspec.json.decode(answer.read(), type=_Roles)
    except urllib.error.HTTPError as error:
        raise ConfigError(f"--act {router}: {error.read().decode(errors='replace')}") from None
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise ConfigError(f"--act {router}: {error}") from None
