"""A router is lost, and its clients come back with their keys through another one: every request
goes on where it is, and gives all its tokens."""

import contextlib

import pytest

from jaxserve.engine.request import SamplingParams
from jaxserve.errors import InvalidRequestError
from jaxserve.fleet.request_frames import check_unused, has_key, keyed_id, seed_of_key
from tests.jaxserve.fleet.fake_worker import FakeWorker, FakeWorkerEngine, expected
from tests.jaxserve.fleet.test_router import LONG, Results, Rig
from tests.jaxserve.waiting import until

NAME = keyed_id("tenant", "a key", b"asked") + ".0"
OTHER = keyed_id("tenant", "a key", b"something else") + ".0"


def lose(router):
    """Closes a router's connections, like a process that is killed."""
    router.connections.close()


def submitted(router, prompt, count, name=NAME, **options):
    results = Results()
    router.submit(prompt, SamplingParams(max_tokens=count, **options), results, request_id=name)
    return results


@pytest.fixture
def fleet():
    made = Rig([], [FakeWorker("domain") for _ in range(2)])
    allow(made, 7)
    yield made
    made.close()


def allow(fleet, tokens):
    """Every request gets this many tokens, for now."""
    for worker in fleet.domains:
        worker.engine.allowed = tokens


def begun(fleet, **options):
    """A request that has its first seven tokens: what it got, and its worker."""
    results = submitted(fleet.router, LONG, 20, **options)
    results.until(lambda: len(results.tokens.get(NAME, [])) == 7)
    (home,) = [w for w in fleet.domains if any("key-" in a for a in w.engine.running)]
    return results, home


def replace_router(fleet):
    """Loses the router; another one comes, and learns which requests are kept."""
    lose(fleet.router)
    fleet.router = fleet.replica()
    workers = fleet.router._coordinator.placement.workers
    until(lambda: any(NAME in worker.orphans for worker in workers.values()))


def test_ids_of_keys():
    assert has_key(NAME)
    assert not has_key("a key")
    assert keyed_id("another", "a key", b"asked") + ".0" != NAME
    same = keyed_id("tenant", "a key", b"asked") + ".0"
    assert seed_of_key(NAME) == seed_of_key(same) < 2**32


@pytest.mark.parametrize(
    ("live", "kept", "why"),
    [
        ([], [], ""),
        ([NAME[:-1] + "1"], [NAME], ""),
        ([keyed_id("another", "a key", b"something else") + ".0", "a key"], [], ""),
        ([NAME], [], "is already running"),
        ([OTHER[:-1] + "1"], [], "other parameters"),
        ([], [NAME, OTHER], "other parameters"),
    ],
)
def test_ids_in_use(live, kept, why):
    with pytest.raises(InvalidRequestError, match=why) if why else contextlib.nullcontext():
        check_unused(NAME, live, kept)


@pytest.mark.parametrize("seed", [3, None])
@pytest.mark.parametrize("when", ["running", "ended"])
def test_a_client_comes_back_through_another_router(fleet, when, seed):
    first, home = begun(fleet, seed=seed)
    unkeyed = submitted(fleet.router, [9], 20, "another", seed=1)
    unkeyed.until(lambda: len(unkeyed.tokens.get("another", [])) == 7)
    lose(fleet.router)
    until(lambda: [*home.engine.running] == [a for a in home.engine.running if "key-" in a] != [])
    if when == "ended":
        home.engine.allowed = 1000
        until(lambda: home.engine.idle)
    replace_router(fleet)
    again = submitted(fleet.router, LONG, 20, seed=seed)
    again.until(lambda: len(again.tokens.get(NAME, [])) >= 7)
    home.engine.allowed = 1000
    again.until(lambda: NAME in again.last)
    want = expected(LONG, 20, seed_of_key(NAME) if seed is None else seed)
    assert again.tokens[NAME] == want
    assert first.tokens[NAME] == want[:7]
    assert sum(prompt == LONG for w in fleet.domains for prompt, _, _ in w.engine.submits) == 1
    fleet.until_idle()


def test_it_goes_on_elsewhere_when_its_domain_is_lost_after_that(fleet):
    _, home = begun(fleet, seed=3)
    replace_router(fleet)
    again = submitted(fleet.router, LONG, 20, seed=3)
    again.until(lambda: len(again.tokens.get(NAME, [])) == 7)
    home.kill()
    allow(fleet, 1000)
    again.until(lambda: NAME in again.last)
    assert again.tokens[NAME] == expected(LONG, 20, 3)


def test_what_differs_with_the_same_key_is_refused_before_anything_runs(fleet):
    begun(fleet, seed=3)
    for more in ({}, {"logprobs": 0}):
        with pytest.raises(InvalidRequestError, match="the same key came with other parameters"):
            submitted(fleet.router, LONG, 20, OTHER, seed=4, **more)
        replace_router(fleet)
    assert sum(len(worker.engine.submits) for worker in fleet.domains) == 1
    again = submitted(fleet.router, LONG[:-1], 20, seed=3)
    again.until(lambda: NAME in again.last)
    assert "another prompt was sent with this key" in again.last[NAME].error


def test_nobody_comes():
    domain = FakeWorker("domain", FakeWorkerEngine(allowed=3), resume_seconds=0.2)
    fleet = Rig([], [domain])
    try:
        first = submitted(fleet.router, LONG, 20, seed=3)
        first.until(lambda: len(first.tokens.get(NAME, [])) == 3)
        lose(fleet.router)
        until(lambda: domain.engine.idle)
        until(lambda: not domain.port.kept._kept)
        fleet.router = fleet.replica()
        domain.engine.allowed = 1000
        again = submitted(fleet.router, LONG, 20, seed=3)
        again.until(lambda: NAME in again.last)
        assert again.tokens[NAME] == expected(LONG, 20, 3), "begun anew"
    finally:
        fleet.close()
