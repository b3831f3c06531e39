"""A router and fake workers over real connections: workers drain, come, go, and change weights,
and every request gets its tokens, once."""

import contextlib
from threading import Event
from unittest.mock import Mock

import msgspec
import pytest

from jaxserve.errors import ConfigError
from jaxserve.fleet import rolling
from jaxserve.roles.worker import Proposal
from tests.jaxserve.fleet.fake_worker import FakeWorker
from tests.jaxserve.fleet.test_router import LONG, Rig, rig
from tests.jaxserve.waiting import until


def with_weights(role, weights):
    worker = FakeWorker(role)
    worker.port.facts = msgspec.structs.replace(worker.port.facts, weights=weights)
    return worker


def statuses(fleet):
    return {one.worker: one.status for one in fleet.router.rolling.workers()}


@pytest.mark.parametrize("mode", ["finish", "move"])
def test_a_domain_drains(mode):
    with rig(1, 2) as fleet:
        one, other = fleet.domains
        for worker in fleet.domains:
            worker.engine.allowed = 7
        fleet.submit_all(range(4), 60)
        fleet.begun(range(4))
        moving = len(one.engine.running)
        assert moving
        status = fleet.router.rolling.drain(one.address, mode)
        assert (status.role, status.worker) == ("domain", one.address)
        until(lambda: statuses(fleet)[one.address] in ("draining", "drained"))
        if mode == "move":
            until(lambda: not one.engine.running)
            until(lambda: statuses(fleet)[one.address] == "drained")
            replayed = [emitted for _, emitted, _ in other.engine.submits if emitted]
            assert [len(emitted) for emitted in replayed] == [7] * moving
        if mode == "finish":
            with pytest.raises(ConfigError, match=f"is draining and has {moving} requests; drain"):
                fleet.router.rolling.remove(one.address, False)
        with pytest.raises(ConfigError, match="not one of the fleet, which has 127"):
            fleet.router.rolling.remove("nowhere:1", False)
        for worker in fleet.domains:
            worker.engine.allowed = 1000
        fleet.check(range(4), 60)
        load = fleet.router.load()
        assert (load.replays, load.moves) == (0, moving if mode == "move" else 0)
        until(lambda: statuses(fleet)[one.address] == "drained")
        before = len(one.engine.submits)
        fleet.submit([*LONG, 9], 5, "9")
        fleet.results.until(lambda: "9" in fleet.results.last)
        assert len(one.engine.submits) == before, "it takes nothing new"
        fleet.router.rolling.drain(one.address, "")
        until(lambda: statuses(fleet)[one.address] == "ready")
        fleet.until_idle()


def test_what_waits_at_a_domain_that_drains_goes_elsewhere():
    with rig(1, 2, fleet__domain_waiting=8) as fleet:
        one, other = (worker.engine for worker in fleet.domains)
        for engine in (one, other):
            engine.slots, engine.allowed = 4, 7
        fleet.submit_all(range(12), 60)
        until(lambda: len(one.running) + len(other.running) == 12)
        until(lambda: sum(r.sent == 7 for e in (one, other) for r in e.running.values()) == 8)
        waiting = len(one.running) - 4
        assert waiting > 0
        fleet.router.rolling.drain(fleet.domains[0].address, "finish")
        until(lambda: len(one.running) == 4)
        for engine in (one, other):
            engine.allowed = 1000
        fleet.check(range(12), 60)
        assert len(fleet.prefills[0].engine.prefilled) == 12, "nothing is computed twice"
        assert fleet.router.load().replays == 0
        fleet.until_idle()


def test_every_router_knows_of_a_drain_and_a_later_one_learns_it():
    with rig(0, 2) as fleet:
        early = fleet.replica()
        address = fleet.domains[0].address
        fleet.router.rolling.drain(address, "finish")
        until(lambda: {w.name: w.status for w in early.load().workers}[address] == "drained")
        late = type(early)(fleet.deployment, "secret", "a model")
        late.start()
        until(lambda: {w.name: w.status for w in late.load().workers}[address] == "drained")
        late.close()
        early.close()


def test_workers_are_added_and_removed():
    with rig(0, 1) as fleet:
        rolling = fleet.router.rolling
        added = FakeWorker("domain")
        try:
            assert rolling.add(added.address, "domain", False).status == "absent"
            until(lambda: statuses(fleet).get(added.address) == "ready")
            with pytest.raises(ConfigError, match="is one of the fleet already"):
                rolling.add(added.address, "domain", False)
            with pytest.raises(ConfigError, match="worker 'nowhere': expected host:port"):
                rolling.add("nowhere", "domain", False)
            for engine in (fleet.domains[0].engine, added.engine):
                engine.allowed = 8
            fleet.submit_all(range(4), 60)
            fleet.begun(range(4))
            with pytest.raises(ConfigError, match=r"is ready and has 2 requests; drain it first"):
                rolling.remove(fleet.domains[0].address, False)
            rolling.remove(fleet.domains[0].address, True)
            until(lambda: list(statuses(fleet)) == [added.address])
            added.engine.allowed = 1000
            fleet.check(range(4), 60)
            assert fleet.router.load().replays == 2
        finally:
            added.close()


@pytest.mark.parametrize("replay", ["same_weights", "any_weights"])
def test_a_request_keeps_to_the_weights_that_it_began_with(replay):
    """One pair of each version. The old domain drains: nothing moves to the new weights, unless
    that is allowed; and when it dies, what it had waits for its weights, and fails for want of
    them. New requests run on the new weights alone, prefill included."""
    workers = [with_weights(role, w) for w in ("old", "new") for role in ("prefill", "domain")]
    prefills, domains = workers[::2], workers[1::2]
    options = {"fleet__replay": replay, "fleet__absent_seconds": 0.5}
    with contextlib.closing(Rig(prefills, domains, **options)) as fleet:
        old, new = (worker.engine for worker in domains)
        old.allowed = new.allowed = 7
        fleet.submit_all(range(4), 60)
        fleet.begun(range(4))
        began = len(old.running)
        assert began
        assert len(prefills[0].engine.prefilled) == began
        fleet.router.rolling.drain(domains[0].address, "move")
        until(lambda: statuses(fleet)[domains[0].address] in ("draining", "drained"))
        fleet.submit([*LONG, 5], 3, "5")
        fleet.results.until(lambda: "5" in fleet.results.last)
        assert len(prefills[0].engine.prefilled) == began, "its pages would be of no use"
        new.allowed = 1000
        if replay == "any_weights":
            fleet.results.until(lambda: len(fleet.results.last) == 5)
            assert fleet.router.load().moves == began
        else:
            fleet.results.until(lambda: len(fleet.results.last) == 5 - began)
            assert len(old.running) == began
            domains[0].kill()
            fleet.results.until(lambda: len(fleet.results.last) == 5)
            errors = [last.error for last in fleet.results.last.values() if last.error]
            assert len(errors) == began
            for error in errors:
                assert error.startswith("no domain with weights old (fleet.replay) was there for")


def test_domains_rebalance_their_experts(monkeypatch):
    proposal = Proposal(
        balance_now=0.5, balance_then=1.0, gain=0.5, moves=1, move_bytes=8, seconds=0.1
    )
    asked = []

    def rebalance(*, dry_run):
        asked.append(dry_run)
        if not dry_run:
            raise ValueError("moves are under way")
        return proposal

    with rig(1, 3) as fleet:
        able, plain, silent = fleet.domains
        plain.engine.experts = None
        able.engine.experts = Mock(rebalance=rebalance)
        silent.engine.experts = Mock(rebalance=lambda *, dry_run: Event().wait())
        monkeypatch.setattr(rolling, "REBALANCE_SECONDS", 2.0)
        found = fleet.router.rolling.rebalance(dry_run=True).workers
        assert found[able.address].proposal["balance_then"] == 1.0
        assert found[plain.address].why == "no experts are moved from here"
        assert found[silent.address].why == "no answer within 2 s"
        monkeypatch.setattr(rolling, "REBALANCE_SECONDS", 0.5)
        found = fleet.router.rolling.rebalance(dry_run=False).workers
        assert found[able.address].why == "moves are under way"
        assert asked == [True, False]
        assert not fleet.router.rolling._rebalances
