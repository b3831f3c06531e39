"""KV pages in host memory: tokens are those without, cold and warm, whatever happens meanwhile."""

import contextlib
import os
import random
import re
from concurrent.futures import Future
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine import page_tier
from jaxserve.engine.engine import Engine
from jaxserve.engine.page_stores import HostPages, PageName, page_names
from jaxserve.engine.request import SamplingParams
from jaxserve.engine.sequence import token_array
from jaxserve.errors import ConfigError
from jaxserve.fleet import host_tier
from jaxserve.fleet.assembly import make_engine
from tests.jaxserve import layouts
from tests.jaxserve.layouts import PROMPTS, Collector, ask, generate, idle
from tests.jaxserve.losing import Losing
from tests.reference.catalogue import CATALOGUE
from tests.reference.tiny_step3 import write_tiny_step3

PAGE_BYTES = 8192
"""Bytes of 8 tokens: keys and values of 64 FP32 numbers in two layers."""


@contextlib.contextmanager
def serving(runtime, model, **cache):
    """An engine with pages for three or four sequences, and host memory for all."""
    mode = runtime.deployment.mode
    overrides = {"mode": mode, "lanes": 2, "cache.pages": 24, "cache.host_gb": 0.1}
    overrides |= {f"cache.{key}": value for key, value in cache.items()}
    deployment = layouts.deployment(model, overrides)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_tier, "PAGES", (1, 4))  # few programs
        with layouts.serving(runtime._replace(deployment=deployment)) as engine:
            yield engine


@pytest.fixture(scope="module", params=["colocated", "afd", "colocated-folder"])
def tiered(request, tiny_model, tmp_path_factory):
    mode, _, folder = request.param.partition("-")
    runtime = request.getfixturevalue(f"{mode}_runtime")
    cache = {"storage": str(tmp_path_factory.mktemp("pages"))} if folder else {}
    with serving(runtime, tiny_model, **cache) as engine:
        yield engine


@pytest.fixture
def cold(tiered):
    idle(tiered)
    tiered.reset_prefix_cache()
    if folder := tiered.deployment.cache.storage:
        written(tiered)
        for path in Path(folder, host_tier.FOLDER).iterdir():
            path.unlink()
        tiered.schedulers[0].fetches._tier.disk._list()
    tiered.host_pages |= dict.fromkeys(tiered.host_pages, 0)
    return tiered


def test_every_page_that_left_comes_back(cold, reference):
    """One after the other, of 70, 69, 48 and 70 tokens with 32 more each: they leave 12, 12, 9 and
    12 full pages in a pool of 24. The last one finds 2 of its prompt's 8 there, and 6 here."""
    for prompt in (1, 7, 8, 1):
        assert ask(cold, PROMPTS[prompt], layouts.GREEDY).token_ids == reference.tokens[prompt]
    found = cold.load().host_pages
    assert (found["queries"], found["hits"], found["lost"]) == (8 + 8 + 5 + 6, 6, 0)
    held = 12 + 12 + 9 if cold.deployment.cache.storage else 1 + 9 + 10
    assert found["held_bytes"] == held * PAGE_BYTES
    assert found["bytes_restored"] == 6 * PAGE_BYTES
    cold.reset_prefix_cache()
    assert cold.load().host_pages["held_bytes"] == 0


@pytest.mark.parametrize("fails", ["", "packed", "unpacked"])
def test_cancels_and_losses(cold, reference, monkeypatch, fails):
    """Requests that end at any moment; copies of pages that fail are computed anew."""
    draw, collector = random.Random(3), Collector()
    whole = getattr(page_tier, fails or "packed")

    def fail(*arguments):
        if draw.random() < 0.3:
            raise RuntimeError("lost")
        return whole(*arguments)

    monkeypatch.setattr(page_tier, fails or "READ_BYTES", fail if fails else 1 << 16)
    for number in range(60):
        prompt = draw.randrange(len(PROMPTS))
        name = f"{number}: prompt {prompt}"
        params = SamplingParams(max_tokens=draw.randrange(1, 32), temperature=0, ignore_eos=True)
        collector.submit(cold, PROMPTS[prompt], params, request_id=name)
        if draw.random() < 0.3:
            cold.cancel(name)
        if draw.random() < 0.1:
            cold.reset_prefix_cache()
    for name, output in collector.wait().items():
        tokens = reference.tokens[int(name.split()[-1])]
        assert output.token_ids == tokens[: len(output.token_ids)], name
    assert (cold.host_pages["lost"] > 0) == (fails != "unpacked")


def written(engine: Engine) -> int:
    """Pages in the folder, once all are there."""
    idle(engine)
    loaded, tier = Future(), engine.schedulers[0].fetches._tier
    engine._post(lambda: [loaded.set_result(tier._copies.submit(int))][1:])
    loaded.result(30).result(30)
    tier.disk._writer.submit(int).result(30)
    return len(os.listdir(tier.disk._folder))


def test_a_restarted_engine_finds_the_pages(
    colocated_runtime, tiny_model, tmp_path, reference, monkeypatch
):
    """Host memory holds half of a prompt. The first engine loses a step, the third a file, and the
    last has another checkpoint of the same shapes."""
    cache = {"storage": str(tmp_path / "made" / "here"), "host_gb": 4 * PAGE_BYTES / 1e9}
    with serving(colocated_runtime, tiny_model, **cache) as engine:
        losing = Losing(engine, monkeypatch)
        losing.lose("stage", after=25)
        assert generate(engine) == reference.tokens
        assert losing.times == 0
        pages = written(engine)
    monkeypatch.undo()
    for number in range(2):
        with serving(colocated_runtime, tiny_model, **cache) as engine:
            assert ask(engine, PROMPTS[1], layouts.GREEDY).token_ids == reference.tokens[1]
            found = engine.load().host_pages
            assert (found["storage_hits"], found["storage_errors"]) == [(8, 0), (3, 1)][number]
            assert found["bytes_restored"] == (8 - 8 * number) * PAGE_BYTES
            assert generate(engine) == reference.tokens
            assert written(engine) >= pages
            engine.reset_prefix_cache()
            assert generate(engine) == reference.tokens
            first = page_names(b"", [token_array(PROMPTS[1][:8]).tobytes()])[0]
            disk = engine.schedulers[0].fetches._tier.disk
            path = disk._folder / disk._file(first)
            path.write_bytes(path.read_bytes()[:-1])
    other = write_tiny_step3(tmp_path / "model", layouts.SIZES, seed=layouts.SEED + 1)
    with serving(colocated_runtime, other, **cache) as engine:
        ask(engine, PROMPTS[1], layouts.GREEDY)
        assert engine.load().host_pages["storage_hits"] == 0


def test_pages_are_read_while_their_requests_wait(
    colocated_runtime, tiny_model, tmp_path, reference, monkeypatch, caplog
):
    """During some of the reads files vanish, or the request is cancelled. Each prompt comes twice,
    once with an answer's first tokens. The engine's thread waits for the reads."""
    cache, every = {"storage": str(tmp_path)}, zip(PROMPTS, reference.tokens, strict=True)
    nine = [(prompt, tokens) for prompt, tokens in every if len(prompt) > 23]
    with serving(colocated_runtime, tiny_model, **cache) as engine:
        generate(engine, [prompt for prompt, _ in nine])
        written(engine)
    with serving(colocated_runtime, tiny_model, **cache) as engine:
        came, tier = [], engine.schedulers[0].fetches._tier
        submit, waiting = tier._returns.submit, engine.schedulers[0].queue.waiting

        def watched(work, *arguments):
            if work != tier._prefetch:
                return submit(work, *arguments)
            for page in arguments[0][1:] if len(came) % 3 == 1 else ():
                (tier.disk._folder / tier.disk._file(page.name)).unlink(missing_ok=True)
            done = submit(work, *arguments)
            if len(came) % 3 == 2:
                engine.cancel(waiting[0].request.request_id)
            done.result(30)
            came.append([page for page in arguments[0] if page.rows is not None])

        monkeypatch.setattr(tier._returns, "submit", watched)
        collector = Collector()
        for number, (prompt, tokens) in enumerate(nine * 2):
            prompt = prompt + tokens[: number % 2 * 16]
            collector.submit(engine, prompt, layouts.GREEDY, request_id=f"{number}")
        for name, output in collector.wait().items():
            tokens = nine[int(name) % 9][1][int(name) % 2 * 16 :][: len(output.token_ids)]
            assert output.token_ids[: len(tokens)] == tokens, name
            assert output.finish_reason in ("length", "cancelled")
        assert 10 < engine.host_pages["prefetched"] <= sum(map(len, came))
    assert "KV pages did not come" not in caplog.text  # nobody counted on those that vanished


@pytest.mark.parametrize(
    ("size", "message"),
    [(1e-6, "a page has 8,192 bytes"), (1e6, r"\d+\.\d GB of host memory are free")],
)
def test_what_cannot_work(colocated_runtime, tiny_model, size, message):
    overrides = {"mode": "colocated", "lanes": 2, "cache.host_gb": size}
    runtime = colocated_runtime._replace(deployment=layouts.deployment(tiny_model, overrides))
    with pytest.raises(ConfigError, match=f"cache.host_gb = {re.escape(f'{size:g}')}: {message}"):
        make_engine(runtime, eos_token_ids=frozenset())


def test_a_window_in_every_layer(tmp_path):
    folder = CATALOGUE["qwen3_moe_window"].write(tmp_path)
    with pytest.raises(ConfigError, match="not for models that have a window in every layer"):
        host_tier.check_host_tier(layouts.deployment(folder, {"cache.host_gb": 0.1}))


def test_names_depend_on_everything_before():
    first, second = page_names(b"", [b"a", b"b"])
    assert page_names(b"", [b"b"], before=first) == [second]
    others = [*page_names(b"salt", [b"a", b"b"]), *page_names(b"", [b"b", b"b"])]
    assert len({name.key for name in [first, second, *others]}) == 6


@given(st.integers(0, 9), st.lists(st.tuples(st.sampled_from("adgf"), st.integers(0, 6))))
def test_the_least_recently_used_leave_first(most, calls):
    """Against a list, the next to leave first. Pages have one to three bytes."""
    store, there = HostPages(most), []
    for call, number in calls:
        name = PageName(bytes([number]), bytes([number % 2]))
        page = store.get(name)
        assert (page is not None) == (name in there)
        if page is not None:
            there.remove(name)
            there.append(name)
        if call == "a" and page is None:
            there.append(name)
            while sum(1 + one.key[0] % 3 for one in there) > most:
                del there[0]
            assert store.add(name, 1 + number % 3).rows is None
        elif call == "d" and page is not None:
            store.discard(page)
            there.remove(name)
        elif call == "f":
            store.forget(name.root)
            there = [one for one in there if one.root != name.root]
        assert store.held == sum(1 + one.key[0] % 3 for one in there) <= most
        assert [*store._pages] == [one.key for one in there]
