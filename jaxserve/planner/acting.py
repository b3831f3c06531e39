"""Carries out the advice of `plan verify --act`: workers of a running fleet change their role.

This asks the first router for the fleet's workers, and tells every router how many domains the
fleet should have (`POST /roles/domains`, `fleet/stand_ins.py`). It acts only while all workers are
ready, so one change is over before the next begins. The cheapest number of domains gives way to
`fleet.ttft_seconds`: while first tokens are late and domains have room, prompts get a worker.
"""

import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.config.deployment import Deployment
from jaxserve.config.load import deployment_of
from jaxserve.errors import ConfigError
from jaxserve.planner.balance import Advice, RoleLoad, next_workers

RECENT = 15
"""Checks whose median is the advice for a running fleet."""
SECONDS = 10.0
"""Time for a router's answer."""
LATE = 0.05
"""Part of the requests whose first tokens may come later than `fleet.ttft_seconds`."""
CALM = 0.8
"""Part of the requests at which first tokens were late, below which prompts need fewer workers."""
FIRST_TOKENS = "jaxserve:time_to_first_token_seconds"
"""The routers' histogram of the seconds from a request's submission to its first token."""


class _First(NamedTuple):
    """First tokens since the routers' start."""

    all: float
    late: float


class _Worker(msgspec.Struct):
    """The part of a `WorkerStatus` that is used here."""

    role: str
    status: str
    routed: int
    others: int


class _Roles(msgspec.Struct):
    workers: list[_Worker]


class RoleBalancer:
    """The attention workers that a running fleet has, and should have.

    Args:
      routers: addresses of the admin ports of all routers, as http://host:8002; empty: the fleet is
        taken to be as its deployment says, and nothing is changed.
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
        self._target = deployment.fleet.ttft_seconds
        self._firsts = deque[_First](maxlen=RECENT)
        self._late_at: tuple[int, float] | None = None
        """Domains beside which first tokens were late, and the requests of that time."""

    @property
    def text(self) -> str:
        """Says what first tokens allow; empty: anything."""
        if self._late_at is None:
            return ""
        return f"first tokens are later than {self._target:g} s (domains: {self._late_at[0]})"

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
        if not self._recent:
            self._firsts.clear()
        self._recent.append(one)
        if self._target and workers:
            each = (_first_tokens(router, self._target) for router in self._routers)
            self._firsts.append(_First(*map(sum, zip(*each, strict=True))))
        found = Advice.settled(self._recent)
        if workers and len(self._recent) == RECENT:
            wanted = self._in_time(next_workers(found, advised, domains, prefills), domains)
            self._wanted = wanted if wanted != found.workers else self._wanted
        for router in self._routers if self._wanted else ():
            _call(router, self._wanted)
        return found

    def _in_time(self, wanted: int, domains: RoleLoad) -> int:
        """Returns how many domains to have next, so that first tokens come in time.

        First tokens that are late while domains have room wait for prefill workers: a domain
        becomes one, if the others have room for its requests, or none is taken away at least. It
        stays so until fewer requests come, or it would be asked back at once.
        """
        if not self._target:
            return wanted
        requests, late = np.subtract(self._firsts[-1], self._firsts[0]).tolist()
        beside, before = self._late_at or (0, 0.0)
        if late > LATE * requests and domains.fits(0):
            if beside != domains.workers:
                self._late_at = beside, before = domains.workers, requests
        elif requests < CALM * before:
            self._late_at = None
        if self._late_at is None:
            return wanted
        return min(wanted, max(beside - 1, domains.workers - domains.fits(-1)))

    def _requests(self, workers: Sequence[_Worker], role: str) -> RoleLoad:
        own = [worker for worker in workers if worker.role == role]
        held = sum(each.routed + each.others for each in own)
        return RoleLoad(len(own), held, self._slots[role])


def _call(router: str, domains: int | None = None) -> _Roles:
    """Asks a router for its workers, or for a number of domains, too; raises as `_answer`."""
    path, body = "/roles", None
    if domains is not None:
        path, body = "/roles/domains", msgspec.json.encode({"domains": domains})
    try:
        return msgspec.json.decode(_answer(router, path, body), type=_Roles)
    except msgspec.DecodeError as error:
        raise ConfigError(f"--act {router}: {error}") from None


def _first_tokens(router: str, target: float) -> _First:
    """Returns the first tokens of a router's requests, and how many took longer than a time, in
    seconds, within whose bucket they are taken to be spread evenly; raises as `_answer`."""
    text = _answer(router, "/metrics").decode()
    below: dict[float, float] = {0.0: 0.0}
    for family in text_string_to_metric_families(text):
        for sample in family.samples if family.name == FIRST_TOKENS else ():
            if "le" in sample.labels:
                bound = float(sample.labels["le"])
                below[bound] = below.get(bound, 0.0) + sample.value
    bounds = sorted(below)
    every = below[bounds.pop()]
    return _First(every, every - float(np.interp(target, bounds, [below[one] for one in bounds])))


def _answer(router: str, path: str, body: bytes | None = None) -> bytes:
    """Asks a router's admin port.

    Raises:
      ConfigError: it refuses, or does not answer in time.
    """
    headers = {"content-type": "application/json"}
    asked = urllib.request.Request(f"{router.rstrip('/')}{path}", body, headers)
    try:
        with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        raise ConfigError(f"--act {router}: {error.read().decode(errors='replace')}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"--act {router}: {error}") from None
