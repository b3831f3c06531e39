"""Logits and tokens of a tiny Qwen3-Next are those that transformers computes
(`tests/reference/tiny_qwen3_next.py`), in the released layout, with prompts longer than a part of
the chunked form. FP32."""

from dataclasses import replace
from typing import Any

import pytest

from jaxserve.checkpoint.hf_config import read_config
from jaxserve.engine import stepper
from jaxserve.errors import ConfigError
from tests.jaxserve import layouts, long_prompts
from tests.jaxserve.engine.test_lost_steps import Failing
from tests.reference.tiny_qwen3_next import ENTRIES, LONG, LONG_3_5, QWEN3_5_FP8, QWEN3_NEXT

pytestmark = pytest.mark.unoptimised

GREEDY, questions, golden = long_prompts.GREEDY, LONG.questions, LONG.golden
LIMITS: dict[str, Any] = ENTRIES["limits"]
LAYOUTS: dict[str, dict[str, Any]] = ENTRIES["layouts"]
SMALL_PAGES = {"cache.page_size": 8, "cache.pages": 33, "scheduler.page_buckets": [32]}
SMALL_PAGES |= {"scheduler.token_buckets": [5, 80]}
RESULTS = pytest.mark.parametrize("results", [LONG, LONG_3_5], ids=["next", "3.5"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return QWEN3_NEXT.write(tmp_path_factory.mktemp("qwen3_next"))


def loaded(folder, **overrides):
    return long_prompts.loaded(folder, LIMITS | overrides)


@RESULTS
def test_logits_in_chunks_and_token_by_token(tmp_path, results):
    """Qwen3.5 is the text part of a model that sees images; its tensors are divided otherwise."""
    runtime = loaded(results.model.write(tmp_path))
    long_prompts.check_logits(runtime, results, 25)
    with layouts.serving(runtime) as engine:
        assert layouts.generate(engine, questions(), GREEDY) == results.golden()[0]
        (domain,) = engine.load().domains
        assert domain.prefix_hits == 0


@pytest.mark.parametrize("layout", ["colocated", *LAYOUTS])
@RESULTS
def test_sequences_that_join_and_leave(tmp_path, results, layout):
    """Preempted and cancelled sequences beside others, again on slots that others have had."""
    runtime = loaded(results.model.write(tmp_path), **LAYOUTS.get(layout, {}), **SMALL_PAGES)
    tokens = results.golden()[0]
    with layouts.serving(runtime) as engine:
        for _ in range(2):
            collector = layouts.Collector()
            dropped = [collector.submit(engine, prompt, GREEDY) for prompt in questions()]
            named = [collector.submit(engine, prompt, GREEDY) for prompt in questions() * 2]
            collector.wait_for_tokens(dropped[0], 3)
            for name in dropped:
                engine.cancel(name)
            made = collector.wait()
            assert [made[name].token_ids for name in named] == tokens * 2
        (domain,) = engine.load().domains
        assert domain.preemptions > 0 or layout in ("2A2F dp", "all-to-all")


def test_steps_that_are_lost(folder, monkeypatch):
    """A lost step may have replaced states: its sequences start over."""
    runtime = loaded(folder, mode="afd")
    with layouts.serving(runtime) as engine:
        failing = Failing(engine.driver, after=12, times=1)
        monkeypatch.setattr(stepper, "step_result", failing.result)
        assert layouts.generate(engine, questions(), GREEDY) == golden()[0]
        assert failing.times == 0


@pytest.mark.parametrize(
    "model", [replace(QWEN3_NEXT, fp8_blocks=True), QWEN3_5_FP8], ids=["next", "3.5"]
)
def test_fp8_blocks_answer_as_their_numbers(model, tmp_path):
    """Released FP8 folders have blocks with scales for matrices, and BF16 for the small ones."""
    found = []
    for name, dequantised in (("floats", True), ("blocks", False)):
        own = model.write(tmp_path / name, dequantised=dequantised)
        with layouts.serving(loaded(own)) as engine:
            found.append(layouts.generate(engine, questions(), GREEDY))
    config, _ = read_config(tmp_path / "blocks")
    assert (config.stored, config.plain_parts) == ("fp8_block", frozenset())
    assert found[0] == found[1]


@pytest.mark.parametrize(("said", "overrides"), ENTRIES["refused"].items())
def test_refused(folder, said, overrides):
    with pytest.raises(ConfigError, match=said):
        loaded(folder, **overrides)
