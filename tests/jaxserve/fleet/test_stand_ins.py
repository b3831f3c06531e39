"""Which worker changes its role, and when it goes back: a fleet on a table, and behind routers."""

import time
from typing import Any

import msgspec
import pytest

from jaxserve.config.load import load_deployment
from jaxserve.errors import ConfigError
from jaxserve.fleet import stand_ins, worker_port
from jaxserve.fleet.registry import Place
from jaxserve.fleet.routed import Worker
from jaxserve.fleet.router import RouterEngine
from jaxserve.fleet.stand_ins import StandIns
from tests import golden
from tests.conftest import REPOSITORY
from tests.jaxserve.fleet.fake_worker import FakeWorker, worker_facts
from tests.jaxserve.fleet.test_router import Rig, rig
from tests.jaxserve.waiting import until

VALUES: dict[str, Any] = golden.sizes("stand-ins")


class Fleet:
    """Workers as a router sees them; p2 takes long prompts only."""

    def __init__(self, *names: str, **overrides: Any):
        values = VALUES | {key.replace("__", "."): value for key, value in overrides.items()}
        self.now = 100.0
        self.stand_ins = StandIns(load_deployment(REPOSITORY, values), lambda: self.now)
        self.places = [Place(f"p{n}:1", "prefill", n == 2) for n in range(3)]
        self.places += [Place(f"d{n}:1", "domain") for n in range(2)]
        self.workers, self.hurried = dict[str, Worker](), list[bool]()
        self.join(*names)

    def join(self, *names: str, stands_in: bool = False, **options: Any) -> None:
        for name in names:
            role = "domain" if stands_in != name.startswith("d") else "prefill"
            options = {"can_stand_in": True} | options
            facts = worker_facts(role, stands_in=stands_in, **options)
            self.workers[f"{name}:1"] = Worker(f"{name}:1", facts, reserved=name == "p2")

    def leave(self, *names: str) -> None:
        for name in names:
            del self.workers[f"{name}:1"]

    def after(self, seconds: float) -> list[tuple[str, bool]]:
        """Who is told to become a domain, or not, at that time; asked ten times a second."""
        found = []
        for _ in range(round(10 * seconds)):
            self.now += 0.1
            orders = self.stand_ins.decide(self.places, self.workers)
            found += [(order.worker.partition(":")[0], order.domain) for order in orders]
            self.hurried = [order.hurry for order in orders] or self.hurried
        return found

    def becomes(self, name: str, stands_in: bool) -> None:
        self.leave(name)
        assert self.after(8) == []
        self.join(name, stands_in=stands_in)


def whole(**overrides: Any) -> Fleet:
    fleet = Fleet("p0", "p1", "p2", "d0", "d1", **overrides)
    assert fleet.after(1) == []
    return fleet


def test_there_and_back():
    fleet = whole()
    fleet.leave("d1")
    assert fleet.after(4.9) == []
    assert fleet.after(0.3) == [("p1", True)], "the last one that has short prompts"
    fleet.workers["p1:1"].drain = "move"
    assert fleet.after(3) == []
    fleet.becomes("p1", stands_in=True)
    assert fleet.after(100) == []
    fleet.join("d1")
    assert fleet.after(0.1) == [("p1", False)]
    fleet.becomes("p1", stands_in=False)
    assert fleet.after(100) == []
    fleet.leave("d0")
    assert fleet.after(5.2) == [("p1", True)], "and again"
    assert fleet.hurried == [True]


def test_a_domain_that_is_started_again_in_time():
    fleet = whole()
    for name in ("d0", "d1", "d0"):
        fleet.leave(name)
        assert fleet.after(4) == []
        fleet.join(name)
        assert fleet.after(1) == []


def test_not_while_a_fleet_starts_and_again_where_it_was_not_heard():
    fleet = Fleet("p0", "p1", "p2", "d0")
    assert fleet.after(100) == []
    fleet.join("d1")
    assert fleet.after(1) == []
    fleet.leave("d1")
    assert fleet.after(5.2) == [("p1", True)]
    assert fleet.after(9.7) == []
    assert fleet.after(6) == [("p1", True)]


@pytest.mark.parametrize("fail", [False, True])
def test_one_prefill_worker_is_left(fail):
    """But for a fleet without any domain, where domains compute prompts themselves."""
    fleet = whole(pages__on_failure="fail" if fail else "recompute")
    fleet.leave("p2", "p0", "d1")
    assert fleet.after(20) == []
    fleet.leave("d0")
    found = fleet.after(30)
    assert found[:1] == ([] if fail else [("p1", True)])


def test_two_at_once_and_one_that_does_not_come():
    fleet = whole()
    fleet.leave("d0", "d1")
    assert sorted(fleet.after(5.2)) == [("p0", True), ("p1", True)]
    for name in ("p0", "p1"):
        fleet.leave(name)
    assert fleet.after(50) == []
    fleet.join("p1", stands_in=True)
    fleet.join("p0")  # its start failed, and it is what it was
    assert fleet.after(15) == [("p0", True)], "once fewer were there for long enough"


def test_another_number_of_domains_is_asked_for():
    """Workers of either role become the other, those that stand in first; then all stay."""
    fleet = whole(fleet__rebalance_roles=True, fleet__least_domains=0)
    for domains, name, becomes in [(3, "p1", True), (2, "p1", False), (1, "d0", False)]:
        fleet.stand_ins.want(domains, 5)
        assert (fleet.after(5.2), fleet.hurried) == ([(name, becomes)], [False])
        fleet.becomes(name, becomes != name.startswith("d"))
        assert fleet.after(100) == []
    fleet.stand_ins.want(2, 5)
    assert fleet.after(5.2) == [("d0", True)], "what it was started as"
    fleet.becomes("d0", stands_in=False)
    fleet.leave("d1")
    assert fleet.after(5.2) == [("p1", True)], "for a domain that is lost, as always"
    for domains in (0, 5):
        with pytest.raises(ConfigError, match=f"{domains} domains of 5 workers: each role keeps"):
            fleet.stand_ins.want(domains, 5)
    with pytest.raises(ConfigError, match=r"fleet.rebalance_roles = false: workers keep"):
        whole().stand_ins.want(1, 5)


def test_workers_that_cannot_or_are_not_well():
    fleet = whole()
    fleet.leave("p1", "d1")
    fleet.join("p1", can_stand_in=False)
    fleet.workers["p0:1"].why = "it is silent"
    assert fleet.after(15) == [("p2", True)]


def test_what_does_not_fit():
    def call(values):
        load_deployment(REPOSITORY, VALUES | values)

    golden.check_arguments("commands/stand_ins.txt", ConfigError, call, {})


class Changing:
    """The workers of a fleet, which tell when they are to change their role, and do when told to.

    Attributes:
      told: worker and role, in the order in which they were told.
    """

    def __init__(self, fleet: Rig):
        self.fleet = fleet
        self.told: list[tuple[FakeWorker, bool]] = []
        for worker in (*fleet.prefills, *fleet.domains):
            worker.port.facts = msgspec.structs.replace(worker.port.facts, can_stand_in=True)
            self._listen(worker)

    def _listen(self, worker: FakeWorker) -> None:
        worker.port.on_become = lambda order: self.told.append((worker, order.domain))

    def change(self, number: int, *, stands_in: bool) -> FakeWorker:
        """Ends the worker that was told last, which is the one of this number, and starts it."""
        until(lambda: len(self.told) == number)
        chosen, domain = self.told[-1]
        assert chosen.port.drain == "move"
        chosen.port.flush(5.0)
        chosen.kill()
        facts = {"can_stand_in": True, "stands_in": stands_in}
        worker = FakeWorker("domain" if domain else "prefill", address=chosen.address, **facts)
        (self.fleet.domains if domain else self.fleet.prefills).append(worker)
        self._listen(worker)
        return worker

    def roles(self, router: RouterEngine) -> list[str]:
        return sorted(one.role for one in router.rolling.workers() if one.status == "ready")


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(worker_port, "AGREED_SECONDS", 1.2)
    monkeypatch.setattr(stand_ins, "ASK_AGAIN_SECONDS", 0.6)


def test_roles_change_under_load(at_once):
    """Two routers, whose requests run all the time; workers of either role become the other, a
    domain only once both routers ask for it. Nothing is lost, and nothing swings."""
    options = {"fleet__rebalance_roles": True, "fleet__stand_in_seconds": 0.2}
    with rig(2, 2, **options) as fleet:
        workers = Changing(fleet)
        fleet.router.close()
        fleet.router, other = fleet.replica(), fleet.replica()
        for worker in fleet.domains:
            worker.engine.pace = 0.01
        steps = [(3, True, True), (2, False, False), (1, False, True), (2, True, False)]
        for number, (domains, becomes, stands_in) in enumerate(steps, start=1):
            names = range(10 * number, 10 * number + 6)
            fleet.submit_all(names, 60)
            fleet.begun(names)
            fleet.router.rolling.want(domains)
            if not becomes:
                time.sleep(0.5)
                assert len(workers.told) < number, "the other router has not agreed"
            other.rolling.want(domains)
            workers.change(number, stands_in=stands_in)
            assert workers.told[-1][1] == becomes
            fleet.check(names, 60)
            there = ["domain"] * domains + ["prefill"] * (4 - domains)
            for router in (fleet.router, other):
                until(lambda router=router, there=there: workers.roles(router) == there)
            time.sleep(0.5)
            assert len(workers.told) == number
        other.close()
