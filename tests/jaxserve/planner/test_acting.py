"""A fleet whose workers change their role by the measured advice, to the cheapest number of domains
and back when the load has gone."""

from typing import Any

import pytest

from jaxserve.config.load import load_deployment
from jaxserve.planner import acting
from jaxserve.planner.acting import RECENT, Roles
from jaxserve.planner.balance import Advice, Balance, Requests, advice, next_workers
from tests.conftest import REPOSITORY
from tests.jaxserve.fleet.test_stand_ins import VALUES

SLOTS, LANES, WORKERS = 64, 3, 6


class Table:
    """Six workers on a table: attention takes a time for each sequence, the ffn role its weights,
    too. What a router is told is done some checks later.

    Attributes:
      requests, prompts: at domains and at prefill workers, of the whole fleet.
      changes: numbers of domains that were asked for.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, domains: int, requests: int):
        values = VALUES | {"fleet.rebalance_roles": True, "scheduler.slots": SLOTS}
        self.roles = Roles(["a", "b"], load_deployment(REPOSITORY, values))
        self.domains, self.requests, self.prompts = domains, requests, 0
        self.away, self.changes = 0, list[int]()
        monkeypatch.setattr(acting, "_call", self.call)

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
    """From any number of domains; where the load would ask for a worker back, it stays, and it
    keeps slots for what is there."""
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


def test_a_worker_that_would_be_asked_back_stays():
    now, back = Advice(2, 3, 0.2), Advice(3, 2, 0.2)
    full, free = Requests(2, 128, 64), Requests(2, 10, 64)
    for after, prefills, found in [(back, free, 2), (now, free, 3), (now, full, 2)]:
        assert next_workers(now, lambda count, share, after=after: after, full, prefills) == found
    assert next_workers(back, lambda count, share: now, Requests(3, 150, 64), free) == 3
    assert next_workers(back, lambda count, share: back, Requests(3, 128, 64), full) == 2
