"""Logits and tokens of a tiny Qwen3-Next are those that transformers computes
(`tests/reference/tiny_qwen3_next.py`), in the released layout, with prompts longer than a part of
the chunked form. FP32."""

import random
from dataclasses import replace
from typing import Any

import pytest

from jaxserve.checkpoint.hf_config import read_config
from jaxserve.engine import stepper
from jaxserve.errors import ConfigError
from tests.jaxserve import hand_offs, layouts, long_prompts
from tests.jaxserve.engine.test_lost_steps import Failing
from tests.jaxserve.fleet import test_domains
from tests.reference.tiny_qwen3_next import ENTRIES, LONG, LONG_3_5, QWEN3_5_FP8, QWEN3_NEXT
from tests.reference.tiny_sizes import VOCAB

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


def drawn(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(2, VOCAB) for _ in range(count)]


def talks(draw: random.Random) -> list[list[int]]:
    """Prompts with the same first tokens, the second and the last one alike but for a token."""
    first = drawn(draw, 37)
    found = [first[:cut] + drawn(draw, more) for cut, more in ((37, 9), (37, 30), (32, 1), (20, 5))]
    return [*found, [*found[1][:50], found[1][50] ^ 1, *found[1][51:]]]


@pytest.mark.parametrize("layout", ["colocated", *LAYOUTS])
@RESULTS
def test_turns_of_conversations_that_overlap(tmp_path, results, layout):
    """A turn goes on from the state at the end of the turn before it. Prompts that differ before
    that state do not, and neither cancelled nor preempted requests leave a wrong one, also on slots
    that others have had."""
    runtime = loaded(results.model.write(tmp_path), **LAYOUTS.get(layout, {}), **SMALL_PAGES)
    draw = random.Random(3)
    prompts = talks(draw)
    with layouts.serving(runtime) as engine:
        said = layouts.ask(engine, prompts[0], GREEDY).token_ids
        layouts.ask(engine, [*prompts[0], *said, *drawn(draw, 7)], GREEDY)
        # The last token was never fed, so the last whole page of 8 ends before it.
        kept = (len(prompts[0]) + len(said) - 1) // 8 * 8
        assert engine.load().domains[0].prefix_hits == kept
        for _ in range(2):
            made = layouts.beside_cancels(engine, questions() * 2, questions(), GREEDY)
            assert made == results.golden()[0] * 2
        for turn in range(3):
            expected = layouts.one_by_one(engine, prompts, GREEDY, str(turn))
            assert layouts.beside_cancels(engine, prompts, prompts[::2], GREEDY) == expected
            assert layouts.generate(engine, prompts, GREEDY) == expected
            pairs = zip(prompts, expected, strict=True)
            prompts = [[*prompt, *said, *drawn(draw, 7)] for prompt, said in pairs]
        (domain,) = engine.load().domains
        assert domain.prefix_hits > kept
        assert domain.preemptions > 0 or layout in ("2A2F dp", "all-to-all")


SIZES = [({}, {}), ({"attention.tp": 4}, {"cache.page_size": 16, "scheduler.page_buckets": [16]})]


@pytest.mark.parametrize(("first", "second"), SIZES)
def test_hand_off(folder, first, second):
    """The state crosses once, behind the last page."""
    prompts = [*talks(random.Random(5)), *questions()]
    limits = LIMITS | {"scheduler.slots": 3}
    with hand_offs.workers(folder, prefill=limits | first, decode=limits | second) as engines:
        *_, expected = hand_offs.check_handed_over(*engines, prompts, GREEDY)
        # Recovery: another domain has emitted the first tokens.
        held = hand_offs.prefill(engines[0], [*prompts[-1], *expected[:6]])
        replayed = {"emitted": expected[:6], "source": held}
        assert layouts.ask(engines[1], prompts[-1], GREEDY, **replayed).token_ids == expected[6:]


def test_tokens_over_pull(folder, monkeypatch):
    test_domains.check_over_pull(folder, LIMITS, LONG, monkeypatch)


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
