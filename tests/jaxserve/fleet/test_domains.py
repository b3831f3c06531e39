"""Several attention workers, each with an engine of its own, share one ffn worker over `pull`.
Each gives the colocated tokens, whichever others join and leave.

The runtimes live in one process here, each on devices of its own; `test_runtimes.py` has them
apart.
"""

import contextlib
import functools
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple
from unittest.mock import patch

import jax
import pytest

from jaxserve.checkpoint.hf_config import read_config
from jaxserve.checkpoint.opening import open_checkpoint
from jaxserve.config.shrink import shrunk
from jaxserve.engine.engine import Engine
from jaxserve.engine.request import SamplingParams
from jaxserve.engine.runtime import Runtime, warm_up
from jaxserve.errors import EngineFailedError
from jaxserve.fleet import shard_links
from jaxserve.fleet.assembly import make_engine
from jaxserve.fleet.attention_runtime import attention_cell
from jaxserve.fleet.ffn_runtime import message_server
from jaxserve.fleet.ffn_shard import runtime_of
from jaxserve.fleet.remote_experts import RemoteExperts
from jaxserve.fleet.role_runtime import RoleRuntime, role_mesh
from jaxserve.link.remote.client import MessageClient
from jaxserve.model.ffn.move_rounds import aligned
from jaxserve.model.ffn.placement import EMPTY
from tests.jaxserve import layouts, long_prompts
from tests.jaxserve.model.ffn.test_placement import random_placement
from tests.jaxserve.waiting import until
from tests.reference import tiny_deepseek_v4, tiny_qwen3_next

pytestmark = [pytest.mark.multihost, pytest.mark.unoptimised]

TOKEN = "a secret"
PROMPTS = layouts.PROMPTS[:7]
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, seed=7, ignore_eos=True)
FFN = {"ffn.ep": 2, "ffn.runtime": "ffn", "link.transport": "pull"}
SHARDS = {"ffn.instances": 2, "link.addresses": ["a:1", "a:2"]}
DOMAINS = {
    "one lane": (2, {}),
    "2 lanes, dp 2": (3, {"lanes": 2, "attention.dp": 2}),
    "2 lanes, tp 2, INT8": (5, {"lanes": 2, "attention.tp": 2, "cache.format": "int8"}),
}
"""Name of a domain → its first device and its settings. The ffn worker has devices 0 and 1; it
starts for the first domain, and compiles for the others when they join."""


class Domain(NamedTuple):
    engine: Engine
    link: MessageClient

    def close(self) -> None:
        self.engine.close()
        self.link.close()


def role_of(model, role, first, overrides, worker=0):
    deployment = layouts.deployment(model, overrides)
    names = read_config(str(model), [], deployment.modules)
    shard = role == "ffn" and deployment.ffn.instances > 1
    make = functools.partial(runtime_of, worker) if shard else RoleRuntime.of
    runtime, devices = make(*names, deployment, role), jax.devices()
    with patch.object(jax, "devices", lambda: devices[first:]):
        mesh = role_mesh(runtime.deployment, role)
    return runtime._replace(mesh=mesh), runtime.deployment, open_checkpoint(str(model), names[1])


@contextlib.contextmanager
def serving(model, changes=None, first=0, worker=0, address="127.0.0.1:0"):
    """An ffn worker."""
    overrides = FFN | {"link.addresses": ["127.0.0.1:1"], "experts.window_seconds": 10_000}
    role = role_of(model, "ffn", first, overrides | (changes or {}), worker)
    server, _ = message_server(*role, TOKEN, address)
    server.address = server.start()
    yield server
    server.close()


@pytest.fixture(scope="module")
def server(tiny_model):
    with serving(tiny_model) as server:
        yield server


def open_domain(model, server, name, first=None, changes=None, shards=()) -> Domain:
    own_first, overrides = DOMAINS[name]
    first, addresses = first or own_first, [one.address for one in (server, *shards)]
    overrides = FFN | overrides | (changes or {}) | {"link.addresses": addresses}
    role, deployment, source = role_of(model, "attention", first, overrides)
    cell, link = attention_cell(role, deployment, source, TOKEN)
    runtime = Runtime(deployment, role.config, cell)
    warm_up(runtime)
    engine = make_engine(runtime, eos_token_ids=frozenset())
    engine.start()
    return Domain(engine, link)


@pytest.mark.nightly
@pytest.mark.parametrize("family", [tiny_deepseek_v4, tiny_qwen3_next], ids=["v4", "next"])
def test_the_tokens_of_transformers(family, tmp_path, monkeypatch):
    recorded, limits = family.LONG, family.ENTRIES["limits"]
    folder = recorded.model.write(tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "FFN", limits | {"mode": "afd"} | FFN)
    monkeypatch.setitem(DOMAINS, "long", (3, {"lanes": 2, "attention.dp": 2}))
    with serving(folder) as server:
        with contextlib.closing(open_domain(folder, server, "long")) as domain:
            made = layouts.generate(domain.engine, recorded.questions(), long_prompts.GREEDY)
            assert made == recorded.golden()[0]


@pytest.fixture(scope="module")
def domains(tiny_model, server):
    """Name → domain; each is opened when a test asks for it."""

    class Opened(dict):
        def __missing__(self, name):
            self[name] = open_domain(tiny_model, server, name)
            return self[name]

    opened = Opened()
    yield opened
    for domain in opened.values():
        domain.close()


@pytest.fixture(scope="module")
def expected(colocated_runtime):
    """The colocated tokens, by the sampling parameters' temperature."""
    with layouts.serving(colocated_runtime) as engine:
        return {params.temperature: generate(engine, params) for params in (GREEDY, SEEDED)}


def generate(engine, params):
    return layouts.generate(engine, PROMPTS, params)


def side_by_side(*calls):
    """Makes the calls at the same time; returns their results."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [made.result(240.0) for made in [pool.submit(call) for call in calls]]


@pytest.mark.parametrize(
    ("count", "params"),
    [
        pytest.param(1, GREEDY, marks=pytest.mark.nightly, id="1-greedy"),
        pytest.param(2, SEEDED, id="2-seeded"),
        pytest.param(3, GREEDY, marks=pytest.mark.nightly, id="3-greedy"),
    ],
)
def test_each_domain_gives_the_colocated_tokens(count, params, domains, expected):
    """Quantised pages have other tokens, which must not depend on who else is there."""
    used = [domains[name] for name in list(DOMAINS)[:count]]
    calls = [functools.partial(generate, domain.engine, params) for domain in used]
    for domain, tokens in zip(used, side_by_side(*calls), strict=True):
        quantised = domain.engine.deployment.cache.format == "int8"
        assert tokens == (
            generate(domain.engine, params) if quantised else expected[params.temperature]
        )
        layouts.idle(domain.engine)
        assert domain.link.counters.failures == 0
        assert domain.engine.compilations_after_ready == 0


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("batching", "settings"),
    [
        ("merge", {}),
        ("cohort", {"ffn.ep": 1}),
        *(("cohort", {"link.dispatch": form}) for form in ("int8", "fp8", "bfloat16")),
        ("cohort", SHARDS),
        ("merge", SHARDS | {"ffn.ep": 4, "ffn.exchange": "alltoall", "ffn.redundant_slots": 1}),
    ],
)
def test_messages_that_share_a_pass_give_the_same_tokens(
    batching, settings, tiny_model, expected, monkeypatch
):
    """Also those of domains one of which cancels requests, or leaves in the middle of its own. With
    messages in other formats the tokens are those of a domain that has the ffn worker alone. Shards
    are several ffn workers, each with some of the experts, and get the rows of these alone."""
    monkeypatch.setattr(shard_links, "LEAST_BYTES", 1)
    monkeypatch.setattr(shard_links, "WORTH", 1.0)
    passes = []
    changes = settings | {"link.batching": batching, "domains": 3}
    with serving(tiny_model, changes) as server, contextlib.ExitStack() as stack:
        run = server.work.run
        monkeypatch.setattr(
            server.work, "run", lambda *call: passes.append(len(call[3])) or run(*call)
        )
        used, numbers = [], range(1, changes.get("ffn.instances", 1))
        shards = [stack.enter_context(serving(tiny_model, changes, n, n)) for n in numbers]
        for first in (2, 4, 6):
            used.append(open_domain(tiny_model, server, "2 lanes, dp 2", first, changes, shards))
            stack.callback(used[-1].close)
            if len(used) == 1 and "link.dispatch" in settings:
                alone = (generate(used[0].engine, params) for params in (GREEDY, SEEDED))
                expected = dict(zip(expected, alone, strict=True))
        for params in (GREEDY, SEEDED):
            calls = [functools.partial(generate, domain.engine, params) for domain in used]
            assert side_by_side(*calls) == [expected[params.temperature]] * 3
        unheard = layouts.Collector()
        for domain in used[1:]:
            for prompt in PROMPTS:
                unheard.submit(domain.engine, prompt, GREEDY)
        unheard.wait_for_tokens("request 0", 1)
        unheard.wait_for_tokens(f"request {len(PROMPTS)}", 1)
        stays = functools.partial(generate, used[0].engine, GREEDY)

        def cancel():
            for number in range(0, len(PROMPTS), 2):
                used[1].engine.cancel(f"request {number}")

        assert side_by_side(stays, cancel, used[2].link.close)[0] == expected[0]
        assert {1, 2, 3} <= set(passes)
        assert used[0].link.counters.failures == 0
        assert used[0].engine.compilations_after_ready == 0


def test_domains_come_and_go_and_the_others_do_not_notice(domains, server, expected, tiny_model):
    """One joins in the middle of another's requests, and leaves with messages open."""
    survivor = domains["2 lanes, dp 2"]
    there = len(server.domains)
    collector = layouts.Collector()
    for prompt in PROMPTS:
        collector.submit(survivor.engine, prompt, GREEDY)
    guest = open_domain(tiny_model, server, "one lane")
    assert generate(guest.engine, GREEDY) == expected[0]
    unheard = layouts.Collector()
    for prompt in PROMPTS:
        unheard.submit(guest.engine, prompt, GREEDY)
    unheard.wait_for_tokens("request 0", 1)
    guest.link.close()
    guest.engine.close()
    assert [output.token_ids for output in collector.wait().values()] == expected[0]
    assert generate(survivor.engine, GREEDY) == expected[0]
    layouts.idle(survivor.engine)
    counters = survivor.link.counters
    assert (counters.failures, counters.resends) == (0, 0)
    until(lambda: len(server.domains) == there)


def test_experts_move_between_messages(domains, server, expected):
    """Domains send logical ids; where experts are, and what they got, is the ffn worker's."""
    work, draw, done = server.work, random.Random(2), 0
    sizes = work.experts.facts.sizes
    work.experts.start()
    work.move_experts(server.passes.between)
    until(lambda: work.experts._got == 1)
    engine = domains["one lane"].engine
    while done < 20:
        collector = layouts.Collector()
        for prompt in PROMPTS:
            collector.submit(engine, prompt, GREEDY)
        while collector._open:
            if not work.experts.view().moving:
                now = work.experts.placements
                wanted = {layer: random_placement(draw, sizes) for layer in now}
                targets = {n: aligned(now[n], wanted[n], sizes.ranks) for n in wanted}
                done += work.experts.place(targets) > 0
            work.move_experts(server.passes.between)
        assert [output.token_ids for output in collector.wait().values()] == expected[0]
    with work.experts._changed:  # looks may have counted meanwhile
        work.experts._wanted = wanted = work.experts._asked + 1

    def counted():
        work.move_experts(server.passes.between)
        return work.experts._got >= wanted

    until(counted)
    tokens = sum(int(counts.sum()) for counts in work.experts._totals.values())
    rows = len(PROMPTS) * (GREEDY.max_tokens - 1)  # and what of prompts was not in the cache
    assert tokens >= rows * layouts.SIZES.moe_top_k * 2  # layers
    ask_for_a_rebalance(work, server, domains["one lane"])
    assert generate(engine, GREEDY) == expected[0]
    work.experts.close()


def test_an_ffn_worker_on_what_is_left_takes_over(domains, server, expected, tiny_model):
    """Both ranks are lost in the middle of requests; a worker of one device has all experts then,
    and the attention worker compiles nothing."""
    domain = domains["one lane"]
    collector = layouts.Collector()
    for prompt in PROMPTS:
        collector.submit(domain.engine, prompt, SEEDED)
    collector.wait_for_tokens("request 0", 3)
    server.close()
    overrides = FFN | {"link.addresses": [server.address]}
    deployment = shrunk(layouts.deployment(tiny_model, overrides), "ffn", 1)
    assert (deployment.ffn.ep, deployment.ffn.tp) == (1, 1)
    with serving(tiny_model, {"ffn.ep": 1}, address=server.address):
        tokens = [output.token_ids for output in collector.wait().values()]
        assert tokens == expected[SEEDED.temperature]
        assert generate(domain.engine, GREEDY) == expected[0]
        assert domain.link.counters.failures > 0
        assert domain.engine.compilations_after_ready == 0


def while_it_serves(work, server, call):
    """Returns the result of a call, during which the ffn worker moves experts."""
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(call)
        until(lambda: work.move_experts(server.passes.between) or made.done())
        return made.result()


def crowd(work, server):
    """The busiest experts get to one rank."""
    carry_out(work, server)
    sizes, targets = work.experts.facts.sizes, {}
    for layer, tokens in work.experts.view().expert_tokens.items():
        busiest = sorted(range(sizes.experts), key=lambda expert: -tokens[expert])
        slots = (*busiest, *[EMPTY] * (sizes.total - sizes.experts))
        targets[layer] = aligned(work.experts.placements[layer], slots, sizes.ranks)
    work.experts.place(targets)


def carry_out(work, server):
    """Moves experts until all are in their places."""
    until(lambda: not (work.move_experts(server.passes.between) or work.experts.view().moving))


def ask_for_a_rebalance(work, server, domain):
    """From the attention runtime, once the busiest experts are on one rank."""
    crowd(work, server)
    carry_out(work, server)
    generate(domain.engine, GREEDY)
    experts, before = RemoteExperts(domain.link.ask), work.experts.view()
    proposed, begun = (
        while_it_serves(work, server, functools.partial(experts.rebalance, dry_run=dry))
        for dry in (True, False)
    )
    assert 0 < proposed.balance_now <= proposed.balance_then <= 1
    assert begun.moves == proposed.moves > 0
    carry_out(work, server)
    after = work.experts.view()
    assert (after.epoch, after.moves) == (before.epoch + 1, before.moves + begun.moves)
    while_it_serves(work, server, experts.look)
    assert experts.view().moves == after.moves
    with pytest.raises(EngineFailedError, match="link: ValidationError: Expected"):
        domain.link.ask(b"what?", 10.0)
