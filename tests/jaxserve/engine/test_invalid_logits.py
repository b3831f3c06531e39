"""Logits that are not numbers: a request that has them is computed anew on other pages, once, and
ends if it has them again. Others never notice."""

import jax
import numpy as np
import pytest

from tests.jaxserve import layouts

pytestmark = pytest.mark.unoptimised

BROKEN = 7
"""A token whose embedding is NaN."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nan")
    layouts.write_damaged_model(folder, "model.embed_tokens.weight", BROKEN, np.nan)
    with layouts.running(folder, layouts.COLOCATED) as engine:
        yield engine


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ends_with_an_error_and_is_counted(engine, temperature):
    params = layouts.SamplingParams(max_tokens=4, temperature=temperature, ignore_eos=True, seed=1)
    before = engine.load().invalid_logits
    collector = layouts.Collector()
    healthy = collector.submit(engine, [3, 4, 5], params)
    broken = collector.submit(engine, [3, BROKEN, 5], params)
    outputs = collector.wait()
    assert outputs[healthy].finish_reason == "length"
    assert outputs[broken].finish_reason == "error"
    assert outputs[broken].token_ids == []
    assert "logits for the next token are not finite" in outputs[broken].error
    assert engine.load().invalid_logits == before + 1
    layouts.idle(engine)
    assert engine.load().quarantined == 0, "the model is to blame, not the pages"


def test_a_page_that_is_damaged_costs_no_token(engine):
    """Two requests share the page, and one has others; a third one, later, must not find it."""
    params = layouts.SamplingParams(max_tokens=24, temperature=0.9, seed=5, ignore_eos=True)
    shared = [10 + n % 40 for n in range(2 * engine.deployment.cache.page_size)]
    prompts = [[*shared, 3], [*shared, 4, 5], [60, 61, 62]]
    expected = layouts.generate(engine, prompts, params)
    before = engine.load()

    def damage():
        (sequence, *_) = [s for s in engine.schedulers[0]._live.values() if s.page_ids]
        page = sequence.page_ids[0]
        damaged.append(page)
        pages = engine.driver._pages
        pages[0] = jax.device_put(pages[0].at[page].set(np.nan), pages[0].sharding)
        return []

    damaged: list[int] = []
    collector = layouts.Collector()
    names = [collector.submit(engine, prompt, params) for prompt in prompts]
    collector.wait_for_tokens(names[0], 6)
    engine._post(damage)
    outputs = collector.wait()
    assert [outputs[name].token_ids for name in names] == expected
    after = engine.load()
    assert after.recomputed - before.recomputed == 2
    assert after.invalid_logits == before.invalid_logits
    assert after.quarantined > 0
    layouts.idle(engine)
    assert layouts.generate(engine, prompts, params) == expected
    assert engine.load().recomputed == after.recomputed
