"""Hand-offs between two engines: the tokens of one engine, and nothing left behind by either.

The domain is its own reference: it computes the same prompts under another cache salt.
"""

import dataclasses
import itertools
import random
import threading
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import yaml

from jaxserve.engine.hand_off import LinkedHandOffs
from jaxserve.engine.loop import Loop
from jaxserve.engine.pages import PageKeys
from jaxserve.engine.request import Request, SamplingParams
from jaxserve.engine.sequence import token_array
from jaxserve.errors import InvalidRequestError
from jaxserve.fleet.assembly import Options, open_engine
from jaxserve.fleet.ffn_runtime import open_ffn
from jaxserve.link.pages.frames import pages_digest
from jaxserve.link.pages.source import NOTHING_HELD, PagesSource
from jaxserve.roles.layout import NO_TOKEN
from jaxserve.roles.worker import ReadPages, WritePages
from tests import golden
from tests.jaxserve import layouts
from tests.jaxserve.hand_offs import (
    TOKEN,
    Held,
    at_rest,
    attach,
    check_counters,
    hand_over,
    limits,
    prefill,
    workers,
)
from tests.jaxserve.layouts import Collector, ask
from tests.jaxserve.waiting import until
from tests.reference.catalogue import CATALOGUE
from tests.reference.tiny_sizes import VOCAB
from tests.reference.tiny_step3 import write_tiny_step3

pytestmark = pytest.mark.unoptimised

GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=10, temperature=1.0, top_p=0.9, seed=7, ignore_eos=True)
_LENGTHS = (1, 16, 17, 33, 64, 65, 97, 150)
"""Around the edges of pages (16, 32), of chunks (32) and of pieces (32, 64)."""


def draw_prompts(seed: int, lengths=_LENGTHS) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(2, VOCAB) for _ in range(length)] for length in lengths]


def bursts(draw: random.Random, count: int, page: int = 16) -> list[list[list[int]]]:
    """Bursts of four prompts with the same first pages, each burst with other ones."""
    return [
        [
            [*shared, *(draw.randrange(2, VOCAB) for _ in range(draw.randrange(1, 110)))]
            for shared in [[draw.randrange(2, VOCAB) for _ in range(page * draw.randrange(1, 4))]]
            for _ in range(4)
        ]
        for _ in range(count)
    ]


def alone(engine, prompts, params=GREEDY) -> list[list[int]]:
    """The tokens that the engine gives without a hand-off."""
    own = msgspec.structs.replace(params, cache_salt=f"alone {random.random()}")
    return layouts.generate(engine, prompts, own)


# A `tp` that differs: `pair`, below. Two roles that decode: the last test.
PAIRS = yaml.safe_load(golden.text("engine/hand_off_pairs.yaml"))


# Formats that differ: `test_quantised_entries_are_converted_where_they_arrive`, too.
@pytest.mark.parametrize(
    "pair", [pytest.param(pair, marks=[pytest.mark.nightly] * ("GQA" in pair)) for pair in PAIRS]
)
def test_the_tokens_are_those_without_a_hand_off(pair, tmp_path):
    name, first, second = PAIRS[pair]
    CATALOGUE[name].write(tmp_path)
    prompts = draw_prompts(0) + bursts(random.Random(23), 1)[0]
    with workers(tmp_path, prefill=first, decode=second) as (source, domain):
        for params in (GREEDY, SEEDED):
            expected = alone(domain, prompts, params)
            salted = [[*prompt[:-1], (prompt[-1] + 1) % VOCAB] for prompt in prompts]
            assert hand_over(source, domain, prompts, params) == expected
            assert hand_over(source, domain, salted, params) == alone(domain, salted, params)
        check_counters(source, domain)


def test_a_prediction_module_s_entries_come_along(tmp_path):
    """The module's rows for a prompt are in the domain's cache as if it had been computed
    there, in pages of another size; and drafts hold after it."""
    sizes = dataclasses.replace(layouts.SIZES, mtp=True, num_hidden_layers=2, moe_layers=(1,))
    write_tiny_step3(tmp_path, sizes, seed=layouts.SEED)
    speculative = {
        "speculative.method": "mtp",
        "speculative.drafts": 1,
        "speculative.automatic": False,
    }
    other_pages = speculative | {"cache.page_size": 32, "cache.pages": 16}
    (prompt,) = draw_prompts(0, [97])
    with workers(tmp_path, prefill=speculative, decode=other_pages) as (source, domain):

        def written(salt: str) -> list[np.ndarray]:
            """The prompt's full pages in the module's layer, which is the last one."""
            keys = PageKeys(salt, token_array(prompt), 32)
            path = domain.schedulers[0].groups[0].cache.match(keys, 96)
            rows = [sizes.num_hidden_layers * 16 + node.page_id for node in path]
            arrays = [np.asarray(array)[rows] for array in domain.driver._pages]
            by_token = [np.moveaxis(array, 1, 2).reshape(96, -1) for array in arrays]
            # The prefill worker is given whole pages alone, so that its module attends from the
            # last token to the one that it draws itself.
            return [array[:95] for array in by_token]

        own = msgspec.structs.replace(GREEDY, cache_salt="own")
        expected = ask(domain, prompt, own).token_ids
        assert hand_over(source, domain, [prompt], GREEDY) == [expected]
        assert counters(domain).transfers == 1
        for here, there in zip(written("own"), written(""), strict=True):
            assert np.abs(here).max() > 0.1
            np.testing.assert_allclose(there, here, rtol=1e-4, atol=1e-5)
        check_counters(source, domain)


def test_quantised_entries_are_converted_where_they_arrive(tmp_path):
    """FP8 to INT8: the log-probabilities are nearly those that the domain's own entries give, and
    far from those after another prompt."""
    CATALOGUE["qwen3"].write(tmp_path)
    prompts = draw_prompts(0, [33, 65, 97, 150])
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, logprobs=20)
    decode = {"cache.format": "int8", "prefill.workers": 1, "prefill.cache": {"format": "fp8"}}
    with workers(tmp_path, prefill={"cache.format": "fp8"}, decode=decode) as (source, domain):
        collector = Collector()
        for number, prompt in enumerate(prompts):
            held = prefill(source, prompt)
            own = msgspec.structs.replace(params, cache_salt="own")
            collector.submit(domain, prompt, own, request_id=f"own {number}")
            collector.submit(domain, prompt, params, request_id=f"got {number}", source=held)
        collector.wait()
        assert counters(domain).transfers == 4
        check_counters(source, domain)

    def apart(name, other):
        """Difference of the likelier tokens' log-probabilities, and the tokens in both."""
        ((first,), (second,)) = map(collector.outputs, (name, other))
        one, two = dict(first.logprobs[0].top), dict(second.logprobs[0].top)
        both = one.keys() & two.keys()
        return max((abs(one[token] - two[token]) for token in both), default=9.0), len(both)

    for number in range(4):
        difference, both = apart(f"got {number}", f"own {number}")
        assert difference < 0.2
        assert both >= 16
        difference, both = apart(f"got {number}", f"own {(number + 1) % 4}")
        assert difference > 0.4 or both < 8


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """tp 2 to 1, pages of 16 to 32, colocated to two lanes of steps of two roles as one program."""
    folder = tmp_path_factory.mktemp("model")
    CATALOGUE["qwen3_moe"].write(folder)
    limits = {"cache.page_size": 32, "cache.pages": 16, "scheduler.max_waiting": 400}
    limits |= {"mode": "afd", "pipeline": "step", "lanes": 2, "scheduler.slots": 2}
    first = {"attention.tp": 2, "scheduler.max_waiting": 400, "pages.held": 6}
    with workers(folder, prefill=first, decode=limits) as (source, domain):
        yield source, domain


@pytest.fixture
def pair(engines):
    """At rest again after each test, also where a lease is released a little later."""
    yield engines
    for engine in engines:
        at_rest(engine)


def counters(domain):
    return domain.hand_offs.domains[0].client.counters


class TestTokens:
    def test_a_domain_that_holds_a_prefix_pulls_the_rest(self, pair):
        source, domain = pair
        (prompt,) = draw_prompts(3, [150])
        expected = alone(domain, [prompt])
        ask(domain, prompt[:97], GREEDY)
        before = counters(domain).bytes
        assert hand_over(source, domain, [prompt], GREEDY) == expected
        first = counters(domain).bytes - before
        assert hand_over(source, domain, [prompt], GREEDY) == expected  # nothing is pulled
        assert counters(domain).bytes - before == first
        token = source.hand_offs.prefill.access.transfer.programs.token_bytes
        assert first == 32 * token  # 96 of 128 tokens are there

    def test_a_prefill_worker_that_holds_a_prefix_computes_the_rest(self, pair):
        source, domain = pair
        (prompt,) = draw_prompts(4, [150])
        assert prefill(source, prompt[:97], request_id="first").cached == 0
        source.cancel("first")
        found = source.schedulers[0].queue.prompt_tokens_found
        expected = alone(domain, [prompt])
        assert hand_over(source, domain, [prompt], GREEDY) == expected
        assert source.schedulers[0].queue.prompt_tokens_found - found == 96
        assert prefill(source, prompt, request_id="again").cached == 128
        source.cancel("again")

    def test_what_was_emitted_elsewhere_is_held_too(self, pair):
        source, domain = pair
        (prompt,) = draw_prompts(5, [60])
        (expected,) = alone(domain, [prompt])
        emitted = expected[:6]
        held = prefill(source, prompt + emitted)
        assert held.tokens == 64
        assert ask(domain, prompt, GREEDY, emitted=emitted, source=held).token_ids == expected[6:]

    def test_prompts_whose_log_probabilities_are_wanted_are_computed(self, pair):
        source, domain = pair
        (prompt,) = draw_prompts(6, [70])
        held = prefill(source, prompt, request_id="scored")
        before = counters(domain).transfers
        collector = Collector()
        params = msgspec.structs.replace(GREEDY, prompt_logprobs=0)
        collector.submit(domain, prompt, params, source=held)
        collector.wait()
        scores = [news.prompt_logprobs for news in collector.outputs("request 0")]
        assert [len(found) for found in scores if found is not None] == [70]
        assert counters(domain).transfers == before
        source.cancel("scored")


class TestPromptsThatShareTheirFirstPages:
    """All of a burst are admitted before one of them has published the shared pages."""

    def test_bursts(self, pair):
        source, domain = pair
        for burst in bursts(random.Random(21), 6):
            expected = alone(domain, burst)
            assert hand_over(source, domain, burst, GREEDY) == expected
            # What came over the link is in the domain's prefix cache.
            assert layouts.generate(domain, burst, GREEDY) == expected

    def test_bursts_with_resets_and_numbers_that_are_none(self, pair, monkeypatch):
        """The prefix caches of both engines are emptied all the time, and every fifth step of the
        prefill worker gives no numbers."""
        source, domain = pair
        steps, complete = itertools.count(1), source._loop.complete

        def spoilt(lane, plan, result):
            if next(steps) % 5 == 0:
                result = result._replace(sampled=np.full_like(result.sampled, NO_TOKEN))
            return complete(lane, plan, result)

        drawn = bursts(random.Random(22), 4)
        expected = [alone(domain, burst) for burst in drawn]
        monkeypatch.setattr(source._loop, "complete", spoilt)
        done = threading.Event()

        def reset():
            while not done.wait(0.01):
                source.reset_prefix_cache()
                domain.reset_prefix_cache()

        resets = threading.Thread(target=reset)
        resets.start()
        try:
            assert [hand_over(source, domain, one, GREEDY) for one in drawn] == expected
        finally:
            done.set()
            resets.join()
        assert source.schedulers[0].recomputed > 0


class TestHolds:
    def test_a_prompt_without_a_full_page(self, pair):
        source, _ = pair
        assert prefill(source, [5] * 16) == NOTHING_HELD

    def test_what_is_held(self, pair):
        source, _ = pair
        held = prefill(source, [5] * 50, request_id="x")
        server = source.hand_offs.prefill.server
        assert held.tokens == 48
        assert (held.address, held.epoch) == (server.address, server.epoch)
        assert held.digest == pages_digest([5] * 48, server.model, "float32")
        assert source.load().held == 1
        assert source.schedulers[0].kv_usage == [pytest.approx(3 / 32)]
        source.schedulers[0].check_integrity()
        source.cancel("x")
        until(lambda: not source.load().held)
        source.cancel("x")

    def test_bad_requests(self, pair):
        source, domain = pair
        with pytest.raises(InvalidRequestError, match="no pages server"):
            domain.prefill([1, 2], Held())
        held = prefill(source, [5] * 50, request_id="y")
        with pytest.raises(InvalidRequestError, match="no link to prefill workers"):
            source.submit([5] * 50, GREEDY, Collector(), source=held)
        with pytest.raises(InvalidRequestError, match="48 tokens are held of a request of 20"):
            domain.submit([5] * 20, GREEDY, Collector(), source=held)
        source.cancel("y")


def test_a_source_may_hold_every_token_of_its_request():
    kept, source = [], PagesSource("x:1", "a", 4, "")
    hand_offs = LinkedHandOffs(Loop([], 0, float), kept.append)
    hand_offs.domains = [SimpleNamespace(client=SimpleNamespace(keep=kept.append))]
    hand_offs.keep(Request(request_id="r", prompt=[1, 2, 3, 4], params=GREEDY, source=source))
    assert kept == [source]


class TestIntegrity:
    @pytest.mark.parametrize(
        ("token", "change", "message"),
        [
            (9, {"digest": "0" * 16}, "digest 0000000000000000 of 48 held tokens"),
            (9, {"tokens": 32}, "of 32 held tokens is not that of the prompt's first 32"),
            (8, {}, "is not that of the prompt's first 48"),
        ],
    )
    def test_what_is_held_is_not_the_prompt_s(self, pair, token, change, message):
        source, domain = pair
        held = msgspec.structs.replace(prefill(source, [9] * 50, request_id="z"), **change)
        assert message in self._error(domain, [token] * 50, held)
        source.cancel("z")

    def test_another_lease(self, pair):
        source, domain = pair
        first = prefill(source, [9] * 50, request_id="z1")
        second = prefill(source, [8] * 50, request_id="z2")
        mixed = msgspec.structs.replace(first, hand_off=second.hand_off)
        error = self._error(domain, [9] * 50, mixed)
        assert f"digest {first.digest} was asked for, {second.digest} is held" in error
        for name in ("z1", "z2"):
            source.cancel(name)

    @staticmethod
    def _error(domain, prompt, held) -> str:
        params = msgspec.structs.replace(GREEDY, cache_salt=f"{random.random()}")
        output = ask(domain, prompt, params, source=held)
        assert output.finish_reason == "error"
        assert not output.token_ids
        return output.error


@pytest.mark.parametrize("change", [{"hand_off": "gone"}, {"epoch": 5}, {"address": "127.0.0.1:9"}])
def test_a_lost_lease_or_worker_is_a_cache_miss(pair, change):
    source, domain = pair
    (prompt,) = draw_prompts(8, [70])
    expected = alone(domain, [prompt])
    held = msgspec.structs.replace(prefill(source, prompt, request_id="l"), **change)
    salt = msgspec.structs.replace(GREEDY, cache_salt=str(change))
    assert ask(domain, prompt, salt, source=held).token_ids == expected[0]
    source.cancel("l")


def test_one_that_waits_is_given_back_with_what_is_held_for_it(pair):
    source, domain = pair
    (prompt,) = draw_prompts(12, [70])
    expected = alone(domain, [prompt])
    long = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
    running = Collector()
    for number in range(4):  # as many as there are slots
        running.submit(domain, [number + 2] * 20, long, request_id=f"w{number}")
    running.wait_for_tokens("w3", 1)
    held = prefill(source, prompt, request_id="w")
    collector = Collector()
    collector.submit(domain, prompt, GREEDY, request_id="w", source=held)
    until(lambda: domain.load().waiting == 1)
    domain.withdraw("w0")
    domain.withdraw("unknown")
    domain.withdraw("w")
    output = collector.wait()["w"]
    assert (output.token_ids, output.finish_reason) == ([], "cancelled")
    assert source.load().held == 1
    assert len(running.output("w0").token_ids) < 100, "it has a slot, and goes on"
    for number in range(4):
        assert running.wait()[f"w{number}"].finish_reason == "length"
    before = counters(domain).transfers
    assert ask(domain, prompt, GREEDY, source=held).token_ids == expected[0]
    assert counters(domain).transfers == before + 1


def test_other_processes_are_told_of_every_piece(pair, monkeypatch):
    """Orders that followers would get: pieces in order, before the steps that need them."""
    source, domain = pair
    told = {"source": [], "domain": []}
    for name, engine in zip(told, pair, strict=True):

        def broadcast(plans, measured, actions, into=told[name]):
            into += [action for action in actions if isinstance(action, ReadPages | WritePages)]
            into += ["steps"] * len(plans)

        end = engine.hand_offs.prefill or engine.hand_offs.domains[0]
        monkeypatch.setattr(engine._stepper, "_followers", SimpleNamespace(broadcast=broadcast))
        monkeypatch.setattr(end.access, "_tell", engine.tell)
    (prompt,) = draw_prompts(14, [150])
    held = prefill(source, prompt, request_id="told")
    hold = source._loop.holds.of_hand_off(held.hand_off)
    ask(domain, prompt, GREEDY, source=held)
    parts = [hold.page_ids[:4], hold.page_ids[4:8]]  # pages of 16 tokens, pieces of 64
    reads = [action for action in told["source"] if action != "steps"]
    assert reads == [ReadPages(0, hold.group, page_ids, 0, 64) for page_ids in parts]
    assert [type(action) for action in told["domain"][:2]] == [WritePages, WritePages]
    assert [len(action.page_ids) for action in told["domain"][:2]] == [2, 2]
    assert {action.cache_format for action in told["domain"][:2]} == {"float32"}
    assert {*told["domain"][2:]} == {"steps"}
    source.cancel("told")


class TestPressure:
    @staticmethod
    def hand_over_as_they_come(pair, prompts, params) -> Collector:
        """Starts all prompts; the domain gets each as soon as it is held."""
        source, domain = pair
        collector = Collector()

        def go_on(number):
            def held(news):
                if not isinstance(news, Exception):
                    name, prompt = f"{number}", prompts[number]
                    collector.submit(domain, prompt, params, request_id=name, source=news)

            return held

        for number, prompt in enumerate(prompts):
            collector._outputs[f"{number}"] = []
            source.prefill(prompt, go_on(number), request_id=f"{number}")
        return collector

    def test_cancelled_at_random_moments(self, pair):
        """More than four slots take; others wait in the domain, and at the prefill worker."""
        source, domain = pair
        threads = threading.active_count()
        draw = random.Random(10)
        prompts = draw_prompts(11, [draw.randrange(1, 150) for _ in range(60)])
        params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        expected = alone(domain, prompts, params)
        collector = self.hand_over_as_they_come(pair, prompts, params)
        for _ in range(80):
            threading.Event().wait(draw.random() * 0.02)
            draw.choice([source, domain]).cancel(f"{draw.randrange(60)}")
            assert source.load().held <= 6
        until(lambda: not source._open)
        outputs = [(int(name), output.token_ids) for name, output in collector.wait().items()]
        assert all(tokens == expected[n][: len(tokens)] for n, tokens in outputs)
        assert sum(len(tokens) == 4 for _, tokens in outputs) >= 10
        # A lease whose request was cancelled on its way between the two is for the router to end.
        for number in range(60):
            source.cancel(f"{number}")
        for engine in pair:
            at_rest(engine)
        until(lambda: counters(domain).queued == 0)
        assert source.hand_offs.prefill.server.counters.registered_bytes == 0
        assert (
            threading.active_count() <= threads + 8
        )  # both ends of the streams to one prefill worker


def test_a_domain_whose_ffn_worker_is_in_another_runtime(tmp_path):
    """AFD over pull as the decode side; pages are written between its gated stages."""
    CATALOGUE["qwen3_moe"].write(tmp_path)
    apart = {"mode": "afd", "lanes": 2, "link.transport": "pull", "ffn.runtime": "ffn"}
    anywhere = {"link.addresses": ["127.0.0.1:9"]}
    server, *_ = open_ffn(limits(tmp_path, apart | anywhere), TOKEN, "127.0.0.1:0")
    address = server.start()
    try:
        engine = open_engine(
            limits(tmp_path, apart | {"link.addresses": [address]}),
            Options(token=TOKEN, prepare=lambda engine: attach(engine, "decode")),
        )
        try:
            prompts = draw_prompts(20)
            with workers(tmp_path, prefill={"cache.page_size": 8, "cache.pages": 64}) as (source,):
                expected = alone(engine, prompts)
                assert hand_over(source, engine, prompts, GREEDY) == expected
                assert counters(engine).transfers > 0
                for each in (source, engine):
                    at_rest(each)
        finally:
            engine.close()
    finally:
        server.close()
