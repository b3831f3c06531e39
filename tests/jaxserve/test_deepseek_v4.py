"""Logits and tokens of a tiny DeepSeek-V4 are those that transformers computes
(`tests/reference/tiny_deepseek_v4.py`), with prompts longer than its windows and rows. FP32."""

import random
from typing import Any

import pytest

from jaxserve.errors import ConfigError
from tests.jaxserve import hand_offs, layouts, long_prompts
from tests.jaxserve.moving import move_at_random
from tests.jaxserve.stepping import Sequences
from tests.reference.tiny_deepseek_v4 import DEEPSEEK_V4, ENTRIES, LONG, WITH_MODULE
from tests.reference.tiny_sizes import VOCAB

pytestmark = pytest.mark.unoptimised

GREEDY, questions, golden = long_prompts.GREEDY, LONG.questions, LONG.golden
LIMITS: dict[str, Any] = ENTRIES["limits"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return DEEPSEEK_V4.write(tmp_path_factory.mktemp("deepseek_v4"))


def loaded(folder, **overrides):
    return long_prompts.loaded(folder, LIMITS | overrides)


def test_logits_in_chunks_and_token_by_token(folder):
    tokens, runtime = golden()[0], loaded(folder)
    long_prompts.check_logits(runtime, LONG, 20)
    with layouts.serving(runtime) as engine:
        assert layouts.generate(engine, questions(), GREEDY) == tokens


LAYOUTS: dict[str, dict[str, Any]] = ENTRIES["layouts"]
MODULE = {"speculative.method": "mtp", "speculative.drafts": 3, "speculative.automatic": False}


@pytest.mark.parametrize("layout", ["colocated", "2A2F tp"])
def test_drafts_of_the_prediction_module(tmp_path, layout):
    """They are those of transformers' layers, and change no token."""
    runtime = loaded(WITH_MODULE.write(tmp_path), **LAYOUTS.get(layout, {}), **MODULE)
    stepped = Sequences(runtime, questions())
    stepped.in_chunks(20)
    assert [stepped.drafts[number] for number in range(3)] == ENTRIES["drafts"]
    with layouts.serving(runtime) as engine:
        assert layouts.generate(engine, questions(), GREEDY) == golden()[0]
        assert engine.load().drafts.drafted > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_of_layouts(folder, layout):
    runtime = loaded(folder, **LAYOUTS[layout])
    tokens = golden()[0]
    with layouts.serving(runtime) as engine:
        assert layouts.generate(engine, questions(), GREEDY) == tokens
        if "moving" in layout:
            move_at_random(engine, questions(), GREEDY, tokens, 2)


def sharing() -> list[list[int]]:
    """Prompts with the same first tokens, which end at, before and behind edges of pages."""
    draw, start = random.Random(0), questions()[2]
    cuts = (63, 64, 65, 96, 128, 130)
    return [start[:cut] + [draw.randrange(2, VOCAB) for _ in range(20)] for cut in cuts]


@pytest.mark.parametrize("layout", ["colocated", "2A2F tp", "folder"])
def test_cached_prefixes_preemption_and_cancels(folder, layout, tmp_path):
    """With a folder, an engine finds there what another one has left."""
    stored = {"cache.host_gb": 0.1, "cache.storage": str(tmp_path), "cache.format": "fp8"}
    host = stored if layout == "folder" else {}
    runtime = loaded(folder, **LAYOUTS.get(layout, host), **{"cache.pages": 14})
    for restarts in range(1 + len(host) // 2):
        with layouts.serving(runtime) as engine:
            expected = layouts.one_by_one(engine, sharing(), GREEDY)
            for _ in range(2):
                assert layouts.beside_cancels(engine, sharing(), sharing()[::2], GREEDY) == expected
            load = engine.load()
            assert load.preemptions > 0 or host
            assert load.domains[0].prefix_hits > 0
            assert bool(load.host_pages.get("hits")) == bool(host)
            assert not restarts or load.host_pages["storage_hits"] > 0


@pytest.mark.parametrize("second", [{}, {"cache.page_size": 64, "cache.pages": 20}])
def test_hand_off(folder, second, monkeypatch):
    monkeypatch.setattr(hand_offs, "PIECES", (64, 128))
    limits = LIMITS | {"cache.format": "int8"}
    with hand_offs.workers(folder, prefill=limits, decode=limits | second) as (source, domain):
        hand_offs.check_handed_over(source, domain, sharing(), GREEDY)


@pytest.mark.parametrize(("said", "overrides"), ENTRIES["refused"].items())
def test_refused(folder, said, overrides):
    with pytest.raises(ConfigError, match=said):
        loaded(folder, **overrides)
