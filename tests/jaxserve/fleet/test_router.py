"""A router and fake workers over real connections: every request gets its tokens, once."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from jaxserve.chaos.proxy import Proxy
from jaxserve.config.deployment import Deployment
from jaxserve.config.load import load_deployment
from jaxserve.engine.request import SamplingParams, TokenOutput
from jaxserve.errors import DrainingError, InvalidRequestError
from jaxserve.fleet import router as router_module
from jaxserve.fleet.router import RouterEngine
from jaxserve.ports import free_port
from tests.conftest import REPOSITORY
from tests.jaxserve.fleet.fake_worker import MODEL, TOKEN, FakeWorker, FakeWorkerEngine, expected
from tests.jaxserve.waiting import failing_once, until

SECONDS = 20
LONG = list(range(10, 40))


class Results:
    """Outputs that requests have received."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.last: dict[str, TokenOutput] = {}
        self._news = threading.Condition()

    def __call__(self, output: TokenOutput) -> None:
        with self._news:
            assert output.request_id not in self.last, "news after the end"
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.last[output.request_id] = output
            self._news.notify_all()

    def until(self, done: Callable[[], Any]) -> None:
        with self._news:
            assert self._news.wait_for(done, SECONDS), (self.tokens, self.last)


class Rig:
    def __init__(self, prefills: list[FakeWorker], domains: list[FakeWorker], **overrides: Any):
        self.prefills, self.domains = prefills, domains
        self.deployment: Deployment = load_deployment(
            REPOSITORY,
            {
                "mode": "colocated",
                "domains": len(domains),
                "prefill.workers": len(prefills),
                "fleet.prefill": [worker.address for worker in prefills],
                "fleet.domains": [worker.address for worker in domains],
                "cluster.heartbeat_seconds": 15,
                **{key.replace("__", "."): value for key, value in overrides.items()},
            },
        )
        self.results = Results()
        self.router = self.replica()

    def replica(self) -> RouterEngine:
        router = RouterEngine(self.deployment, TOKEN, MODEL)
        router.start()
        assert router.wait(SECONDS), router.connections.absences()
        mine = {w.address for w in (*self.prefills, *self.domains) if w.model == MODEL}
        until(lambda: mine <= {w.name for w in router.load().workers if w.status == "ready"})
        return router

    def submit(self, prompt: list[int], count: int, name: str, **options: Any) -> None:
        options = {"seed": 3, **options}
        params = SamplingParams(max_tokens=count, **options)
        self.router.submit(prompt, params, self.results, request_id=name)

    def submit_all(self, numbers: Iterable[int], count: int) -> None:
        """A request for each number, whose prompt ends with it."""
        for n in numbers:
            self.submit([*LONG, n], count, f"{n}")

    def begun(self, numbers: Iterable[int], count: int = 7) -> None:
        """Waits until the requests of `submit_all` have this many tokens."""
        tokens = self.results.tokens
        self.results.until(lambda: all(len(tokens.get(f"{n}", [])) >= count for n in numbers))

    def check(self, numbers: Iterable[int], count: int) -> None:
        """Waits until the requests of `submit_all` have ended; each has all of its tokens."""
        self.results.until(lambda: {f"{n}" for n in numbers} <= set(self.results.last))
        for n in numbers:
            assert self.results.tokens[f"{n}"] == expected([*LONG, n], count, 3)

    def close(self) -> None:
        self.router.close()
        for worker in (*self.prefills, *self.domains):
            worker.close()

    def until_idle(self) -> None:
        """Nothing is left anywhere."""
        workers = [w for w in (*self.prefills, *self.domains) if not w.engine._closed.is_set()]
        until(lambda: all(worker.engine.idle for worker in workers))
        until(lambda: not self.router._coordinator.requests)
        coordinator = self.router._coordinator
        assert not coordinator._attempts
        for worker in coordinator.placement.workers.values():
            assert (worker.requests, worker.work, worker.promised) == ({}, 0.0, 0)


@contextlib.contextmanager
def rig(prefills: int = 1, domains: int = 1, **overrides: Any) -> Iterator[Rig]:
    made = Rig(
        [FakeWorker("prefill") for _ in range(prefills)],
        [FakeWorker("domain") for _ in range(domains)],
        **overrides,
    )
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize(("prefills", "domains"), [(0, 1), (1, 1), (2, 2)])
def test_tokens(prefills, domains):
    with rig(prefills, domains) as fleet:
        prompts = {f"{n}": [n + 5] * (3 * n + 1) for n in range(12)}
        for name, prompt in prompts.items():
            fleet.submit(prompt, 9, name)
        fleet.results.until(lambda: len(fleet.results.last) == 12)
        for name, prompt in prompts.items():
            assert fleet.results.tokens[name] == expected(prompt, 9, 3)
            assert fleet.results.last[name].finish_reason == "length"
        fleet.until_idle()
        submits = [one for worker in fleet.domains for one in worker.engine.submits]
        for prompt, _, source in submits:
            handed = bool(prefills) and len(prompt) > 4
            assert (source is not None) == handed, "less than a page goes to the domain at once"
        if domains == 2:
            assert all(worker.engine.submits for worker in fleet.domains)


def test_cached_tokens_are_those_that_nobody_computed():
    """Counts the hits of the worker that computed the prompt: a prefill worker or the domain."""
    with rig() as fleet:
        fleet.prefills[0].engine.found = 8
        fleet.submit(LONG, 3, "handed over")
        fleet.submit([7] * 4, 3, "too short to be")
        fleet.results.until(lambda: len(fleet.results.last) == 2)
        found = {name: output.cached_tokens for name, output in fleet.results.last.items()}
        assert found == {"handed over": 8, "too short to be": 4}


def test_without_a_seed_the_router_draws_one():
    with rig(0, 1) as fleet:
        for name in ("a", "b", "c"):
            fleet.submit([7], 5, name, seed=None)
        fleet.results.until(lambda: len(fleet.results.last) == 3)
        assert len({tuple(tokens) for tokens in fleet.results.tokens.values()}) > 1


@pytest.mark.parametrize("how", ["killed", "failed", "stuck"])
def test_a_lost_domain_s_requests_go_on_elsewhere(how):
    with rig(1, 2) as fleet:
        for worker in fleet.domains:
            worker.engine.pace = 0.02
        fleet.submit_all(range(6), 60)
        fleet.begun(range(6), 10)
        victim = fleet.domains[0]
        lost = len(victim.engine.running)
        assert lost
        if how == "killed":
            victim.kill()
        elif how == "failed":
            victim.engine.fail("out of memory")
        else:
            victim.engine.stuck = True
            # cluster.step_seconds and heartbeat_seconds are over
            victim.engine.last_turn = time.monotonic() - 46
        fleet.check(range(6), 60)
        replayed = [one for one in fleet.domains[1].engine.submits if one[1]]
        assert len(replayed) == lost
        assert all(source is not None for _, _, source in replayed), "prefilled once more"
        assert fleet.router.load().replays == lost
        cause = {"killed": "closed"}.get(how, how)
        assert fleet.router.load().losses == {"domain": {cause: 1}}
        victim.close()
        fleet.prefills[0].engine.held.clear() if how == "stuck" else fleet.until_idle()


class Renaming(Proxy):
    """Changes the bit that makes another field of `token_ids`: what remains is a message, too."""

    def _changed(self, data: bytes) -> bytes:
        return data.replace(b"token_ids", b"token_idr")


@pytest.mark.parametrize(("proxy_class", "mode"), [(Renaming, "corrupt"), (Proxy, "omit")])
def test_a_connection_that_changes_bytes_loses_no_token(proxy_class, mode):
    """Whatever they hit, handshakes too; some requests begin again, from their logs."""
    with contextlib.ExitStack() as stack:
        domains, proxies = [FakeWorker("domain") for _ in range(2)], []
        for domain in domains:
            listens = f"127.0.0.1:{free_port()}"
            proxies.append(proxy_class(listens, domain.address))
            stack.callback(proxies[-1].close)
            domain.address = listens
        rig = Rig([], domains, fleet__attempts=100)
        stack.callback(rig.close)
        rig.submit_all(range(24), 150)
        rig.begun(range(24), 1)
        for proxy in proxies:
            proxy.disturb(mode, 0.05)
        until(lambda: rig.router._coordinator.replays > 8)
        for proxy in proxies:
            proxy.disturb("")
        rig.check(range(24), 150)
        assert {output.finish_reason for output in rig.results.last.values()} == {"length"}


def test_a_silent_worker_is_named_before_it_is_given_up(caplog):
    with rig(0, 2, cluster__heartbeat_seconds=5) as fleet:
        victim = fleet.domains[1]
        assert fleet.router.load().problems == []
        victim.port._send_state = lambda: None
        until(lambda: fleet.router.load().problems)
        (problem,) = fleet.router.load().problems
        assert problem.startswith("domain worker 1: it has been silent for 1.")
        assert [worker.status for worker in fleet.router.load().workers] == ["ready", "suspect"]
        assert f"domain worker {victim.address} is suspect" in caplog.text
        del victim.port._send_state
        until(lambda: fleet.router.load().problems == [])
        assert fleet.router.load().losses == {}
        victim.kill()
        until(lambda: fleet.router.load().losses == {"domain": {"closed": 1}})
        (problem,) = fleet.router.load().problems
        assert problem.startswith("domain worker 1: ")
        victim.close()


def test_lost_pages_are_made_again():
    lost = []

    def fetch(source, tokens):
        assert source.digest == f"{sum(tokens[: source.tokens])}"
        if len(lost) < 2:
            lost.append(source)
            return "the lease is over"
        return None

    domain = FakeWorker("domain", FakeWorkerEngine(fetch=fetch))
    with contextlib.closing(Rig([FakeWorker("prefill")], [domain])) as fleet:
        fleet.submit_all([1], 5)
        fleet.check([1], 5)
        assert len(fleet.prefills[0].engine.prefilled) == 3
        fleet.until_idle()
        domain.engine.fetch = lambda source, tokens: "never"
        fleet.submit(LONG[::-1], 5, "b")
        fleet.results.until(lambda: "b" in fleet.results.last)
        last = fleet.results.last["b"]
        assert (last.finish_reason, last.unavailable) == ("error", True)
        assert "never; it has lost 4 workers (fleet.attempts = 3)" in last.error
        fleet.until_idle()


def test_a_worker_that_comes_back_is_used():
    with rig(0, 1, fleet__absent_seconds=15) as fleet:
        address = fleet.domains[0].address
        fleet.domains[0].engine.gate.clear()
        fleet.submit(LONG, 5, "a")
        until(lambda: fleet.domains[0].engine.running)
        fleet.domains[0].kill()
        until(lambda: fleet.router.status == "starting")
        fleet.submit(LONG, 4, "b")
        fleet.domains.append(FakeWorker("domain", address=address))
        fleet.results.until(lambda: len(fleet.results.last) == 2)
        assert fleet.results.tokens == {"a": expected(LONG, 5, 3), "b": expected(LONG, 4, 3)}
        assert fleet.router.status == "ready"


@pytest.mark.parametrize("on_failure", ["recompute", "fail"])
@pytest.mark.parametrize(
    "patience",
    [
        {"PREFILL_SECONDS": 0.1, "RUNNING_SECONDS": SECONDS},
        {"START_SECONDS": 0.1, "RUNNING_SECONDS": 0},
    ],
    ids=["the fleet runs", "it starts"],
)
def test_a_router_that_starts_while_no_prefill_worker_is_there(on_failure, patience, monkeypatch):
    for name, seconds in patience.items():
        monkeypatch.setattr(router_module, name, seconds)
    with rig(1, 1, pages__on_failure=on_failure) as fleet:
        fleet.prefills[0].kill()
        late = RouterEngine(fleet.deployment, TOKEN, MODEL)
        late.start()
        try:
            until(lambda: late.status == "ready")  # a domain is there
            if on_failure == "fail":
                assert not late.wait(1.0)
                return
            assert late.wait(SECONDS)
            results, params = Results(), SamplingParams(max_tokens=5, seed=3)
            late.submit(LONG, params, results, request_id="a")
            results.until(lambda: "a" in results.last)
            assert results.tokens["a"] == expected(LONG, 5, 3)
        finally:
            late.close()


@pytest.mark.parametrize("place", ["waiting", "prefill", "held", "domain"])
def test_cancelled_wherever_it_is(place):
    with rig(1, 1, fleet__domain_waiting=0, pages__on_failure="fail") as fleet:
        prefill, domain = fleet.prefills[0].engine, fleet.domains[0].engine
        domain.gate.clear()
        if place == "prefill":
            prefill.gate.clear()
        elif place in ("held", "waiting"):
            for n in range(4):
                fleet.submit([n], 3, f"{n}")
            until(lambda: len(domain.running) == 4)
        if place == "waiting":
            prefill.gate.clear()
            fleet.prefills[0].kill()
            until(lambda: fleet.router._coordinator.placement.absent("prefill"))
        fleet.submit(LONG, 5, "a")
        until(lambda: fleet.router._coordinator.requests["a"].place == place)
        if place == "domain":
            until(lambda: domain.running)
        fleet.router.cancel("a")
        fleet.results.until(lambda: "a" in fleet.results.last)
        assert fleet.results.last["a"].finish_reason == "cancelled"
        prefill.gate.set()
        domain.gate.set()
        if place != "waiting":
            fleet.until_idle()


def test_a_router_that_is_gone_leaves_nothing():
    with rig(1, 1) as fleet:
        prefill, domain = fleet.prefills[0].engine, fleet.domains[0].engine
        other, results = fleet.replica(), Results()
        domain.gate.clear()
        for n in range(6):
            params = SamplingParams(max_tokens=5, seed=1)
            other.submit([*LONG, n], params, results, request_id=f"{n}")
        until(lambda: len(domain.running) == 6)
        prefill.gate.clear()
        other.submit(LONG[::-1], params, results, request_id="p")
        until(lambda: prefill.prompts)
        fleet.submit([9], 5, "mine")
        other.connections.close()
        until(lambda: len(domain.running) == 1)
        until(lambda: prefill.idle)
        domain.gate.set()
        fleet.results.until(lambda: "mine" in fleet.results.last)
        assert fleet.results.tokens["mine"] == expected([9], 5, 3)
        fleet.until_idle()


def test_held_pages_are_renewed():
    with rig(1, 1, fleet__domain_waiting=0, pages__lease_seconds=0.3) as fleet:
        domain = fleet.domains[0].engine
        domain.gate.clear()
        for n in range(4):
            fleet.submit([n], 3, f"{n}")
        until(lambda: len(domain.running) == 4)
        fleet.submit(LONG, 3, "a")
        until(lambda: len(fleet.prefills[0].engine.renewed) >= 2)
        domain.gate.set()
        fleet.results.until(lambda: len(fleet.results.last) == 5)


def test_requests_are_checked_before_they_leave():
    with rig(1, 1) as fleet:
        with pytest.raises(InvalidRequestError, match="prompt: 200 tokens leave no room"):
            fleet.submit([1] * 200, 5, "a")
        with pytest.raises(InvalidRequestError, match=r"prompt\[1\]: token id 1000 is not in"):
            fleet.submit([1, 1000], 5, "a")
        fleet.domains[0].engine.gate.clear()
        fleet.submit([1], 5, "a")
        with pytest.raises(InvalidRequestError, match="'a' is already running"):
            fleet.submit([1], 5, "a")
        fleet.domains[0].engine.gate.set()
        assert fleet.router.drain(SECONDS)
        with pytest.raises(DrainingError):
            fleet.submit([1], 5, "b")


def test_all_workers_forget_their_prefix_caches():
    with rig(1, 2) as fleet:
        fleet.router.reset_prefix_cache()
        engines = [worker.engine for worker in (*fleet.prefills, *fleet.domains)]
        until(lambda: [engine.resets for engine in engines] == [1, 1, 1])


def test_workers_that_do_not_belong_are_not_used(caplog):
    foreign = FakeWorker("domain", model="another model")
    with contextlib.closing(Rig([], [FakeWorker("domain"), foreign])) as fleet:
        until(lambda: "model = a model, here another model" in caplog.text)
        fleet.submit_all(range(6), 3)
        fleet.check(range(6), 3)
        assert not foreign.engine.submits
        stranger = RouterEngine(fleet.deployment, "guess", MODEL)
        stranger.start()
        until(lambda: "another token" in str(stranger.connections.absences()))
        stranger.close()


def test_views_and_loads_of_the_fleet():
    with rig(1, 2) as fleet:
        until(lambda: fleet.router.pipeline().steps == 7)
        fleet.submit(LONG, 3, "a")
        fleet.results.until(lambda: "a" in fleet.results.last)
        fleet.domains[1].kill()

        def status() -> list[str]:
            return [worker.status for worker in fleet.router.load().workers]

        until(lambda: status() == ["ready", "ready", "absent"])
        load = fleet.router.load()
        assert [worker.role for worker in load.workers] == ["prefill", "domain", "domain"]
        assert load.workers[0].pages_tokens == 28
        until(lambda: fleet.router.load().kv_usage == [0.25])
        assert fleet.router.model_info()["max_length"] == 200


@pytest.mark.parametrize("failing", ["dial", "Thread-"])
def test_a_thread_that_cannot_be_started_leaves_no_worker_undialled(failing, monkeypatch):
    """The thread that dials, or the timer of its handshake."""

    def its(thread: threading.Thread) -> bool:
        timer = isinstance(thread, threading.Timer)
        return thread.name.startswith(failing) and timer is (failing != "dial")

    error = RuntimeError("can't start new thread")
    failed = failing_once(monkeypatch, threading.Thread, "start", error, its)
    with rig(0, 1) as fleet:
        assert failed.is_set()
        fleet.submit([3], 5, "x")
        fleet.results.until(lambda: "x" in fleet.results.last)
        (worker,) = fleet.domains
        until(lambda: len(worker.port._routers) == 1)


def test_a_frame_that_is_not_taken_loses_no_token(monkeypatch):
    """Outputs after the failing one are lost; the requests go on from the tokens taken before."""
    with rig(0, 1) as fleet:
        coordinator, error = fleet.router._coordinator, KeyError("a defect")
        failed = failing_once(
            monkeypatch, coordinator, "output", error, lambda *_: fleet.results.tokens.get("x")
        )
        fleet.submit([3], 8, "x")
        fleet.results.until(lambda: "x" in fleet.results.last)
        assert failed.is_set()
        assert fleet.results.tokens["x"] == expected([3], 8, 3)
        assert fleet.router.load().losses == {"domain": {"failed": 1}}
