"""A fleet whose workers change their role by the measured advice, and back."""

from typing import Any

import numpy as np
import pytest

from jaxserve.config.load import load_deployment
from jaxserve.planner import acting
from jaxserve.planner.acting import RECENT, RoleBalancer
from jaxserve.planner.balance import Advice, Balance, advice
from jaxserve.server.metrics import Metrics
from tests.conftest import REPOSITORY
from tests.jaxserve.fleet.test_stand_ins import VALUES

SLOTS, LANES, WORKERS = 64, 3, 6


class Table:
    """Six workers on a table: attention takes a time for each sequence, the ffn role its weights,
    too. What a router is told is done some checks later.

    Attributes:
      requests, prompts: at domains and at prefill workers, of the whole fleet.
      changes: numbers of domains that were asked for.
      rate: first tokens a check at either router.
    """

    def __init__(self, monkeypatch: Any, domains: int, requests: int, more: Any = ()):
        values = VALUES | {"fleet.rebalance_roles": True, "scheduler.slots": SLOTS} | dict(more)
        self.roles = RoleBalancer(["a", "b"], load_deployment(REPOSITORY, values))
        self.domains, self.requests, self.prompts = domains, requests, 0
        self.away, self.changes = 0, list[int]()
        self.rate, self.first = 0, np.zeros(2)
        monkeypatch.setattr(acting, "_call", self.call)
        monkeypatch.setattr(acting, "_first_tokens", self.first_tokens)

    def first_tokens(self, router: str, target: float) -> Any:
        """A prefill worker has ten in time from one check to the next."""
        self.first += self.rate, max(0, self.rate - 10 * (WORKERS - self.domains))
        return acting._First(*self.first)

    def call(self, router: str, wanted: int | None = None) -> Any:
        if wanted not in (None, self.domains, *self.changes[-1:]):
            assert (abs(wanted - self.domains), self.away) == (1, 0), "one after the other"
            self.changes.append(wanted)
            self.away = 4
        numbers = {"domain": self.domains, "prefill": WORKERS - self.domains}
        held = {"domain": self.requests, "prefill": self.prompts}
        status = "draining" if self.away else "ready"
        each = [(role, held[role] // n) for role, n in numbers.items() for _ in range(n)]
        return acting._Roles([acting._Worker(role, status, count, 0) for role, count in each])

    def advised(self, workers: int, share: float) -> Advice:
        load = min(SLOTS, self.requests / self.domains) * share
        times = Balance(1e-3 * load, 0.005 + 3e-4 * load, 0.0)
        return advice(workers, LANES, times, (1e-4, 1e-4), (1.0, 3.0))

    def check(self, checks: int = 8 * RECENT) -> int:
        """Checks so often; returns how many domains there are then."""
        for _ in range(checks):
            self.roles.settled(self.advised)
            self.away = max(0, self.away - 1)
            if not self.away and self.changes:
                self.domains = self.changes[-1]
        return self.domains


@pytest.mark.parametrize(
    ("requests", "domains"), [(10, {1}), (40, {2}), (130, {3}), (500, {3, 4, 5})]
)
def test_a_fleet_comes_to_rest(monkeypatch, requests, domains):
    """From any number of domains. A worker that would be asked for again stays."""
    for start in range(1, WORKERS):
        fleet = Table(monkeypatch, start, requests)
        assert (found := fleet.check()) in domains
        assert len(fleet.changes) == abs(start - found), "never back and forth"
        fleet.prompts = 10**4
        assert (fleet.check(), len(fleet.changes)) == (found, abs(start - found))
    fleet.requests = 10
    assert fleet.check() == 1, "once the load has gone"
    fleet.requests = 500
    assert fleet.check() == 1, "prefill workers are needed where they are"
    fleet.prompts = 0
    assert fleet.check() == 3


@pytest.mark.parametrize(("requests", "domains"), [(126, 2), (180, 3)])
def test_prompts_get_workers_while_first_tokens_are_late(monkeypatch, requests, domains):
    """Unless the others lack slots for its requests; back once fewer prompts come."""
    fleet = Table(monkeypatch, 3, requests, {"fleet.ttft_seconds": 2.0})
    fleet.rate = 40
    assert (fleet.check(), fleet.changes) == (domains, [2] * (domains == 2))
    assert "first tokens are later than 2 s (domains: 3)" in fleet.roles.text
    fleet.rate = 20
    assert (fleet.check(), fleet.roles.text) == (3, "")
    fleet.rate, fleet.requests = 100, 10**3
    assert fleet.check() >= 3, "requests wait for domains"


def test_late_first_tokens_are_counted(monkeypatch):
    metrics = Metrics("model")
    for seconds in (0.1, 0.4, 1.0, 2.0, 3000.0):
        metrics.first_token(seconds, 0.0)
    monkeypatch.setattr(acting, "_answer", lambda router, path: metrics.text())
    for target, late in ((0.6, 3), (0.9, 2.5), (1.2, 2), (9999.0, 1)):
        assert acting._first_tokens("router", target) == pytest.approx((5, late))
