"""The coordinator alone, in simulated time: what it chooses, and that nothing is ever lost."""

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jaxserve.engine.request import TokenOutput
from jaxserve.errors import EngineFailedError, OverloadedError
from jaxserve.fleet import routed as orders
from jaxserve.fleet.estimates import blocks_of, prompt_cost
from jaxserve.fleet.fleet_load import fleet_load
from jaxserve.fleet.registry import Place
from jaxserve.fleet.request_frames import Cancel
from jaxserve.fleet.routed import Job, Routed, Worker
from jaxserve.link.pages.source import PagesLoad
from jaxserve.observe.load import EngineLoad
from tests import golden
from tests.jaxserve.fleet.fake_worker import worker_facts
from tests.jaxserve.fleet.fleet_world import World


def test_a_gap_in_the_tokens_begins_the_request_again() -> None:
    world = World.without_prefill("d0:1", "d1:1")
    world.submit("a", 10)
    ((attempt, (worker, request)),) = world.running.items()
    first, third = (TokenOutput(request_id=attempt, token_ids=[at], offset=at) for at in (0, 2))
    assert world.coordinator.output(attempt, first) == (request, [])
    passed_on, (cancel, submit) = world.coordinator.output(attempt, third)
    assert passed_on is None
    assert cancel == orders.SendFrame(worker, Cancel(attempt))
    assert (submit.request, request.emitted, request.lost) == (request, [0], 1)


def one_by_one(world: World, request: Routed) -> tuple[Worker | None, Worker | None]:
    """The prefill worker and the domain for a request, by asking one after the other."""
    placement, now = world.coordinator.placement, world.now
    deployment, estimates = world.deployment, placement.estimates
    hits = placement.index.hits(request.blocks)
    length = len(request.tokens)

    def usable(role):
        return [w for w in placement.of(role) if not w.suspect and w.full_until <= now]

    prefills = usable("prefill")
    versions = {w.facts.weights for w in usable("domain")}
    prefills = [w for w in prefills if not versions or w.facts.weights in versions]

    def alike(workers, long):
        return [w for w in workers if long and w.reserved == (length >= long)] or workers

    prefills = alike(prefills, deployment.prefill.long_tokens)
    room = deployment.fleet.prefill_waiting + deployment.pages.held

    def seconds(worker):
        known = min(hits.get(worker.name, 0), length - 1)
        cost = prompt_cost(length, known, worker.facts.attention_cost)
        return estimates.seconds(worker.speed, worker.work + cost)

    def fullness(worker):
        late = worker.pace > deployment.fleet.tpot_seconds > 0 and worker.count > 0
        lacking = length - hits.get(worker.name, 0)
        taken = estimates.taken(worker) + estimates.promised(request) + lacking
        return worker.count >= worker.facts.slots, late, taken / worker.facts.tokens

    domains = alike(usable("domain"), deployment.fleet.long_tokens)
    most = deployment.fleet.domain_waiting
    return (
        min((w for w in prefills if w.count < room), key=seconds, default=None),
        min((w for w in domains if w.count < w.facts.slots + most), key=fullness, default=None),
    )


class Fleet(RuleBasedStateMachine):
    """Anything may happen in any order; at the end every request has ended, with its tokens."""

    NAMES = ("p0", "p1", "d0", "d1")

    @initialize(
        waiting=st.integers(0, 2),
        held=st.integers(1, 3),
        fail=st.booleans(),
        long=st.booleans(),
        versions=st.booleans(),
        replay=st.sampled_from(["same_weights", "any_weights"]),
    )
    def begin(self, waiting, held, fail, long, versions, replay):
        self.weights = dict.fromkeys(self.NAMES, "old")
        if versions:
            self.weights |= {"p1": "new", "d1": "new"}
        self.world = World(
            fleet__replay=replay,
            fleet__domain_waiting=waiting,
            fleet__prefill_waiting=2,
            fleet__attempts=100,
            pages__held=held,
            pages__on_failure="fail" if fail else "recompute",
            prefill__long_tokens=40 * long,
            prefill__long_workers=int(long),
            fleet__long_tokens=40 * long,
            fleet__long_domains=int(long),
            fleet__tpot_seconds=0.5,
        )
        self.count, self.long = 0, long

    @property
    def there(self):
        return self.world.coordinator.placement.workers

    @rule(which=st.sampled_from(NAMES))
    def join(self, which):
        if which not in self.there:
            tokens = 320 if which == "d1" else 16000
            options = {"slots": 2, "tokens": tokens, "weights": self.weights[which]}
            self.world.join(which, which in ("p1", "d1") and self.long, **options)

    @rule(which=st.sampled_from(NAMES))
    def leave(self, which):
        self.world.leave(which)

    @rule(length=st.integers(1, 70), tokens=st.integers(1, 4), whole=st.booleans())
    def submit(self, length, tokens, whole):
        self.count += 1
        try:
            self.world.submit(f"r{self.count}", length, tokens, whole=whole)
        except OverloadedError:
            assert f"r{self.count}" not in self.world.coordinator.requests

    @rule(data=st.data())
    def prefilled(self, data):
        if self.world.prompts:
            self.world.computed(data.draw(st.sampled_from(sorted(self.world.prompts))))

    @rule(data=st.data())
    def emits(self, data):
        if self.world.running:
            self.world.emit(data.draw(st.sampled_from(sorted(self.world.running))))

    @rule(data=st.data(), overloaded=st.booleans())
    def rejects(self, data, overloaded):
        attempts = sorted(self.world.running) + sorted(self.world.prompts)
        if attempts:
            attempt = data.draw(st.sampled_from(attempts))
            fresh = self.world.running.pop(attempt, None)
            self.world.prompts.pop(attempt, None)
            if fresh is None or not fresh[1].emitted:
                error = OverloadedError("full") if overloaded else EngineFailedError("ends")
                self.world.take(self.world.coordinator.rejected(attempt, error))
            else:
                self.world.running[attempt] = fresh

    @rule(data=st.data())
    def loses_pages(self, data):
        fresh = [a for a, (_, r) in self.world.running.items() if r.source is not None]
        if fresh:
            attempt = data.draw(st.sampled_from(sorted(fresh)))
            del self.world.running[attempt]
            news = TokenOutput(request_id=attempt, finish_reason="error", pages_lost=True)
            whose, actions = self.world.coordinator.output(attempt, news)
            assert whose is None
            self.world.take(actions)

    @rule(data=st.data())
    def gives_back(self, data):
        if self.world.withdrawn:
            self.world.give_back(data.draw(st.sampled_from(sorted(self.world.withdrawn))))

    @rule(data=st.data())
    def cancel(self, data):
        names = sorted(self.world.coordinator.requests)
        if names:
            name = data.draw(st.sampled_from(names))
            self.world.take(self.world.coordinator.cancel(name))
            assert self.world.ended[name] == "cancelled"

    @rule(
        which=st.sampled_from(NAMES),
        age=st.sampled_from([0.0, 9.0]),
        others=st.integers(0, 1),
        drain=st.sampled_from(["", "", "", "finish", "move"]),
    )
    def state(self, which, age, others=0, drain=""):
        held = sum(worker == which for worker in self.world.held.values())
        load = EngineLoad(running=0, held=held, kv_usage=[0.5])
        status = "draining" if drain else "ready"
        self.world.told(which, load, status=status, turn_age=age, others=others, drain=drain)

    @rule(seconds=st.sampled_from([0.1, 1.0, 12.0]))
    def time_passes(self, seconds):
        self.world.tick(seconds)

    @invariant()
    def the_books_add_up(self):
        world, coordinator = self.world, self.world.coordinator
        known = {a for w in self.there.values() for a in w.requests}
        assert known == set(coordinator._attempts)
        assert {*world.prompts, *world.running} <= known
        assert set(world.held) <= known, "pages that nobody would ever release"
        waiting = [*coordinator._waiting]
        for request in coordinator.requests.values():
            assert waiting.count(request) == (request.place in ("waiting", "held")), request.place
        for worker in self.there.values():
            promised = sum(r.promised for r in worker.requests.values() if r.worker is worker)
            assert worker.promised == promised
            prefilling = [r for r in worker.requests.values() if r.place == "prefill"]
            assert worker.work == pytest.approx(sum(r.cost for r in prefilling), abs=1e-6)
        for length in (20, 60):
            prompt = [length] * length
            probe = Routed(Job("?", prompt, 4), world.now, (0.0, 0), blocks_of(prompt, ""))
            placement = coordinator.placement
            chosen = placement.choose_prefill(probe), placement.choose_domain(probe)
            assert chosen == one_by_one(world, probe)

    def teardown(self):
        if not hasattr(self, "world"):
            return
        for name in self.NAMES:
            if name not in self.there:
                self.world.join(name, slots=2, weights=self.weights[name])
            self.state(name, 0.0)
        for _ in range(10_000):
            if self.world.prompts:
                self.world.computed(next(iter(self.world.prompts)))
            elif self.world.running:
                self.world.emit(next(iter(self.world.running)))
            elif self.world.coordinator.requests:
                self.time_passes(1.0)
            else:
                break
            self.the_books_add_up()
        assert not self.world.coordinator.requests
        assert not self.world.held
        assert set(self.world.log) == set(self.world.ended)
        for name, reason in self.world.ended.items():
            if reason == "length":
                log = self.world.log[name]
                assert log == list(range(len(log)))


TestFleet = Fleet.TestCase
TestFleet.settings = settings(
    max_examples=20, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


class TestChoices:
    def test_a_domain_that_leaves_the_prefill_worker_alone_comes_last(self):
        world = World.of("p0", "d0", "d1")
        sizes = dict.fromkeys(("queued", "page_size", "pages", "compilations"), 0)
        late = EngineLoad.of([], hand_offs=PagesLoad(timed_out={"a": "silent for 5.0 s"}), **sizes)
        assert late.problems == ["pages of a: silent for 5.0 s"]
        for where, domains in (("d1", ("d0",)), ("d0", ("d0", "d1"))):
            for name in domains:
                world.told(name, late)
            world.submit(f"a{where}", 600)
            world.computed(next(iter(world.prompts)))
            assert world.sent[-1].worker == where

    def test_the_one_that_has_the_prefix(self):
        world = World.of("p0", "p1", "d0")
        world.submit("a", 0, prompt=list(range(320)))
        world.computed(next(iter(world.prompts)))
        world.submit("b", 0, prompt=[7] * 320)
        assert [a.worker for a in world.sent if isinstance(a, orders.SendPrefill)] == ["p0", "p0"]
        world.submit("c", 0, prompt=[*range(320), *[5] * 64])
        assert world.sent[-1].worker == "p0"
        request = world.coordinator.requests["c"]
        assert request.cost == 64 + (384**2 - 320**2) / 32768
        world.submit("d", 0, prompt=[*range(320), *[5] * 64], cache_salt="another tenant")
        assert world.sent[-1].worker == "p1"

    def test_long_prompts_are_due_later(self):
        world = World.of("p0", "p1", "d0")
        for n, length in enumerate((100, 2100, 5000, 30_000), start=1):
            world.submit(f"r{n}", length)
        assert [action.priority for action in world.sent] == [0, 1, 2, 5]
        assert 30_000 + 30_000**2 / 32768 > 2048 * 2**4

    def test_one_that_has_the_prompt_needs_no_prefill(self):
        world = World.of("p0", "d0", "d1")
        world.submit("a1", 0, prompt=list(range(64)), max_tokens=1)
        world.computed(next(iter(world.prompts)))
        where = world.sent[-1].worker
        world.emit(next(iter(world.running)))
        world.submit("a2", 0, prompt=[*range(64), 1, 2, 3], max_tokens=1)
        assert isinstance(world.sent[-1], orders.SendSubmit)
        assert world.sent[-1].worker == where

    @golden.table("fleet/suspects.yaml")
    def test_a_suspect_gets_nothing_new_until_it_is_well(self, news, why):
        world = World.without_prefill("d0", "d1")
        if news is None:
            world.coordinator.silent("d0", 1.7)
        else:
            world.told("d0", **news)
        assert world.coordinator.placement.workers["d0"].why == why
        for n in range(1, 4):
            world.submit(f"a{n}", 10)
        assert {action.worker for action in world.sent} == {"d1"}
        world.told("d0", turn_age=1.4)
        world.submit("a4", 10)
        assert world.sent[-1].worker == "d0"


class TestServiceLevel:
    def world(self, **overrides: Any) -> World:
        limits = {"fleet__ttft_seconds": 2.0, "fleet__tpot_seconds": 0.05}
        world = World.of("p0", "p1", "d0", fleet__late="refuse", **limits, **overrides)
        world.speeds(p0=1000.0, p1=1000.0)
        return world

    def test_a_first_token_that_would_be_late(self):
        world = self.world()
        world.submit("a1", 1500)
        world.submit("a2", 1500)
        with pytest.raises(OverloadedError) as caught:
            world.submit("a3", 1500)
        # 1500 + 1500² / 32768 = 1568.7 tokens, twice, at 1000 a second
        assert "after 3.14 s, and fleet.ttft_seconds = 2" in str(caught.value)
        assert caught.value.retry_after_s == pytest.approx(1.137, abs=1e-3)
        world.submit("a4", 100)
        assert world.coordinator.refusals == 1

    def test_tokens_that_would_be_slow(self):
        world = self.world()
        world.submit("a1", 10, max_tokens=50)
        (attempt,) = world.running
        for _ in range(40):
            world.emit(attempt)
            world.now += 0.08
        with pytest.raises(OverloadedError, match=r"0.080 s, and fleet.tpot_seconds = 0.05"):
            world.submit("a2", 10)
        while world.running:
            world.emit(attempt)
        world.submit("a3", 10)

    def test_the_wait_at_a_full_domain(self):
        """Six requests of 128 tokens at 4 slots: a seventh waits until three have ended."""
        world = World.without_prefill("d0")
        domain = world.coordinator.placement.workers["d0"]
        domain.facts = worker_facts("domain", slots=4)
        domain.pace, domain.others = 0.05, 6
        assert world.coordinator.placement.estimates.wait(domain) == pytest.approx(4.8)


def test_what_no_prefill_worker_holds_waits_at_the_router_in_order():
    """Short prompts: one runs, one waits at the domain, three at the router, one is refused."""
    world = World(fleet__domain_waiting=1, fleet__prefill_waiting=3)
    world.join("p0")
    world.join("d0", slots=1)
    for n in range(5):
        world.submit(f"a{n}", 2, max_tokens=1)
    assert len(world.running) == 2
    with pytest.raises(OverloadedError, match="2 requests running or waiting at 1 domain workers"):
        world.submit("a5", 2)
    while world.running:
        world.emit(next(iter(world.running)))
    assert list(world.ended) == ["a0", "a1", "a2", "a3", "a4"]


def test_smaller_priorities_first():
    world = World(fleet__domain_waiting=0, fleet__prefill_waiting=9)
    world.join("p0")
    world.join("d0", slots=1)
    for name, priority in (("a0", 0), ("later", 1), ("soon", 0)):
        world.submit(name, 2, max_tokens=1, priority=priority)
    while world.running:
        world.emit(next(iter(world.running)))
    assert list(world.ended) == ["a0", "soon", "later"]


def test_a_worker_that_never_came_may_leave():
    assert World.of("p0", "d0").coordinator.left("d9") == []


class TestMoves:
    """Two domains of one slot; requests without a prefill worker, a2 and a3 wait at d0."""

    def world(self) -> World:
        world = World.without_prefill(fleet__domain_waiting=4)
        world.join("d0", slots=1)
        for n in range(4):
            world.submit(f"a{n}", 10, max_tokens=1 + 9 * (n == 0))
        world.join("d1", slots=1)
        return world

    def asked(self, world: World) -> list[str]:
        return [world.running[attempt][1].job.request_id for attempt in sorted(world.withdrawn)]

    def test_the_first_that_waits_goes_to_a_slot_that_is_free(self):
        world = self.world()
        world.tick()
        assert not world.withdrawn, "it has only just come"
        world.now += 0.5
        for expected in ("a1", "a2", "a3"):
            world.tick()
            assert self.asked(world) == [expected]
            world.tick()
            assert self.asked(world) == [expected], "one slot, one request"
            world.give_back(*world.withdrawn)
            (attempt,) = [a for a, (worker, _) in world.running.items() if worker == "d1"]
            assert world.running[attempt][1].job.request_id == expected
            world.emit(attempt)
        world.tick()
        assert not world.withdrawn, "what runs stays"
        assert world.ended == {"a1": "length", "a2": "length", "a3": "length"}
        assert world.coordinator.replays == 0

    def test_a_domain_that_is_full_is_not_waited_for(self):
        world = self.world()
        world.now += 1.0
        world.told("d1", EngineLoad(running=1, kv_usage=[0.9], waiting=1))
        world.tick()
        assert not world.withdrawn


class TestLongSequences:
    """d1, with one slot, takes sequences of 100 tokens and more."""

    def world(self, *lengths: int, weights: str = "one") -> World:
        world = World(fleet__long_tokens=100, fleet__long_domains=1)
        world.join("p0", weights="one")
        world.join("d0", weights="one")
        world.join("d1", True, slots=1, weights=weights)
        for n, length in enumerate(lengths):
            world.submit(f"a{n}", length, max_tokens=5)
            world.computed(*world.prompts)
        return world

    def where(self, world: World) -> dict[str, str]:
        return {one.job.request_id: worker for worker, one in world.running.values()}

    def test_they_have_domains_of_their_own_while_one_is_there(self):
        world = self.world(99, 100, 300)
        assert self.where(world) == {"a0": "d0", "a1": "d1", "a2": "d1"}
        world.tick(1.0)
        assert not world.withdrawn, "free slots of d0 are not for a2"
        world.leave("d0")
        world.computed(*world.prompts)
        assert self.where(world) == {"a0": "d1", "a1": "d1", "a2": "d1"}

    def test_what_grows_long_goes_there_one_by_one(self):
        world = self.world(98, 98)
        for attempt in [*world.running] * 2:
            world.emit(attempt)
        for name in ("a0", "a1"):
            world.tick()
            ((attempt, (worker, _, length)),) = world.prompts.items()
            assert (worker, length) == ("p0", 100)
            world.tick()
            assert [*world.prompts] == [attempt], "the one slot is spoken for"
            world.computed(attempt)
            assert self.where(world)[name] == "d1"
            while name not in world.ended:
                world.emit(next(one for one in world.running if one.startswith(name)))
        assert world.log == {"a0": [0, 1, 2, 3, 4], "a1": [0, 1, 2, 3, 4]}
        assert (world.coordinator.moves, world.coordinator.replays) == (2, 0)

    def test_what_could_not_run_there_stays(self):
        world = self.world(99, weights="two")
        world.emit(*world.running)
        world.tick(1.0)
        assert self.where(world) == {"a0": "d0"}


class TestOtherWeights:
    """A prefill worker whose weights no domain has."""

    def world(self, **overrides: Any) -> World:
        world = World(**overrides)
        world.join("p0", weights="one")
        assert self.why(world, "p0") == ""
        world.join("d0", weights="two")
        return world

    def why(self, world: World, name: str) -> str:
        world.told(name)
        return world.coordinator.placement.workers[name].why

    def test_it_gets_nothing_and_says_why(self):
        world = self.world()
        why = self.why(world, "p0")
        assert why.startswith("its weights are one (version ")
        assert ", those of the domains two (version " in why
        load = fleet_load(world.coordinator, [Place("p0", "prefill"), Place("d0", "domain")])
        assert load.problems == [f"prefill worker 0: {why}"]
        world.join("d1", weights="one")
        assert self.why(world, "p0") == ""

    @pytest.mark.parametrize("state", [False, True], ids=["at once", "later"])
    def test_the_domain_computes_the_prompts(self, state):
        world = self.world()
        if state:
            self.why(world, "p0")
        world.submit("a", 100)
        assert [(type(one), one.worker) for one in world.sent] == [(orders.SendSubmit, "d0")]

    def test_where_it_may_not_they_wait_and_are_told(self):
        world = self.world(pages__on_failure="fail")
        self.why(world, "p0")
        world.submit("a", 100)
        assert not world.sent
        world.tick(world.deployment.fleet.absent_seconds + 1)
        (end,) = world.sent
        assert end.unavailable
        assert end.error.startswith("no prefill worker with the weights of a domain was there for")


def test_the_load_of_a_fleet_has_the_pages_link():
    """Transfers are counted at the domains, which receive what prefill workers give."""
    world = World.of("p0", "d0", "d1")
    ends = {
        "p0": PagesLoad(transfers=5, bytes=500, expired=2, registered_bytes=64),
        "d0": PagesLoad(transfers=3, bytes=300, queued=1, wait_seconds=0.5),
        "d1": PagesLoad(transfers=2, bytes=200, failures=1, corrupt=2, wait_seconds=0.25),
    }
    for name, pages in ends.items():
        world.told(name, EngineLoad(hand_offs=pages))
    load = fleet_load(world.coordinator, [Place("p0", "prefill"), Place("d0", "domain")])
    whole = {"transfers": 5, "bytes": 500, "failures": 1, "corrupt": 2, "queued": 1}
    whole |= {"wait_seconds": 0.75, "expired": 2, "registered_bytes": 64}
    assert load.hand_offs == PagesLoad(**whole)
    assert [worker.hand_offs for worker in load.workers] == [ends["p0"], ends["d0"]]


def test_deadlines_where_no_worker_looks_at_them():
    world = World()
    world.submit("a1", 5, deadline=103.0)
    world.join("p0")
    world.submit("a2", 50, deadline=104.0)
    for seconds, ended in ((2.9, []), (0.1, ["a1"]), (1.0, ["a1", "a2"])):
        world.tick(seconds)
        assert world.ended == dict.fromkeys(ended, "cancelled")
    assert not world.prompts


def test_prompts_too_long_to_be_computed_again_wait_for_a_prefill_worker():
    world = World(pages__recompute_tokens=100, fleet__absent_seconds=60)
    world.join("d0")
    world.submit("a1", 100)
    world.submit("a2", 101)
    assert [r.job.request_id for _, r in world.running.values()] == ["a1"]
    world.tick(61)
    assert world.ended == {"a2": "error"}
    assert world.sent[-1].error == "no prefill worker was there for 61 s (fleet.absent_seconds)"


class TestWeightsThatNoWorkerHasAnyMore:
    """Requests have begun with them, and may go on with the same ones alone."""

    def world(self, count: int) -> World:
        world = World.without_prefill(fleet__domain_waiting=0)
        world.join("d0", slots=count, weights="old")
        for n in range(count):
            world.submit(f"a{n}", 10)
        for attempt in list(world.running):
            world.emit(attempt)
        world.leave("d0")
        world.join("d1", slots=1, weights="new")
        return world

    def test_others_that_wait_are_served(self):
        """However many wait that could run nowhere, as many as may wait."""
        world = self.world(64)
        world.submit("b0", 10, max_tokens=1)
        world.submit("b1", 10, max_tokens=1)
        for name in ("b0", "b1"):
            ((attempt, (_, request)),) = world.running.items()
            assert request.job.request_id == name
            world.emit(attempt)
        world.tick()
        assert world.coordinator.waiting == 64

    def test_they_go_on_when_such_a_worker_comes(self):
        world = self.world(40)
        world.join("d0", slots=40, weights="old")
        world.tick()
        assert len(world.running) == 40
        world.leave("d0")
        world.tick(61)
        assert set(world.ended.values()) == {"error"}
        assert world.coordinator.waiting == 0


def test_a_client_is_told_of_the_waits_of_all_queues():
    routed = Routed(Job("a", [1], 4), 0.0, (0.0, 0), waited=2.0)
    assert routed.queued(TokenOutput(request_id="a", queue_seconds=0.5)) == 2.5
