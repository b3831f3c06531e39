"""Logits and tokens of a tiny Qwen3-Next are those that transformers computes
(`tests/reference/tiny_qwen3_next.py`), in the released layout, with prompts longer than a part of
the chunked form. FP32."""

import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from jaxserve.checkpoint.hf_config import read_config
from jaxserve.errors import ConfigError
from tests.jaxserve import hand_offs, layouts, long_prompts
from tests.jaxserve.stepping import Sequences
from tests.jaxserve.test_drafts import Counted
from tests.reference.tiny_qwen3_next import ENTRIES, LONG, LONG_3_5, QWEN3_5_FP8, QWEN3_NEXT
from tests.reference.tiny_sizes import VOCAB

pytestmark = pytest.mark.unoptimised

GREEDY, questions = long_prompts.GREEDY, LONG.questions
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
    long_prompts.check_logits(loaded(results.model.write(tmp_path)), results, 25)


def drawn(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(2, VOCAB) for _ in range(count)]


def talks(draw: random.Random) -> list[list[int]]:
    """Prompts with the same first tokens, the second and the last one alike but for a token."""
    first = drawn(draw, 37)
    found = [first[:cut] + drawn(draw, more) for cut, more in ((37, 9), (37, 30), (32, 1), (20, 5))]
    return [*found, [*found[1][:50], found[1][50] ^ 1, *found[1][51:]]]


# Text repeats itself, so that some drafts hold.
FEW_TOKENS = msgspec.structs.replace(GREEDY, logit_bias=dict.fromkeys((3, 9, 20), 4.0))


@pytest.mark.parametrize("layout", ["colocated", *LAYOUTS])
@RESULTS
def test_turns_of_conversations_that_overlap(tmp_path, results, layout):
    """A turn goes on from the state at the end of the turn before it. Prompts that differ before
    that state do not, and neither cancelled nor preempted requests leave a wrong one, also on slots
    that others have had. Drafts leave no trace in it: tokens are those of requests without. The
    pool has room for a tenth of all pages, and host memory for all, or for some beside a folder."""
    chosen, drafts = LAYOUTS.get(layout, {}), "drafts" in layout
    chosen = chosen | {"cache.storage": str(tmp_path / "pages")} if "folder" in layout else chosen
    model = replace(results.model, sizes=replace(results.model.sizes, module=drafts))
    runtime = loaded(model.write(tmp_path), **SMALL_PAGES | chosen)
    draw = random.Random(3)
    prompts, params = talks(draw), FEW_TOKENS if drafts else GREEDY
    with layouts.serving(runtime) as engine:
        counted = Counted(engine)
        said = layouts.ask(engine, prompts[0], GREEDY).token_ids
        layouts.ask(engine, [*prompts[0], *said, *drawn(draw, 7)], GREEDY)
        # The last token was never fed, so the last whole page of 8 ends before it.
        kept = (len(prompts[0]) + len(said) - 1) // 8 * 8 * ("no prefixes" not in layout)
        assert engine.load().domains[0].prefix_hits == kept
        own = "8 bits" in layout and layouts.one_by_one(engine, questions(), GREEDY)
        for _ in range(2):
            made = layouts.beside_cancels(engine, questions() * 2, questions(), GREEDY)
            assert made == (own or results.golden()[0]) * 2
        for turn in range(3):
            plain = msgspec.structs.replace(params, speculative=False)
            expected = layouts.one_by_one(engine, prompts, plain, str(turn))
            assert layouts.beside_cancels(engine, prompts, prompts[::2], params) == expected
            assert layouts.generate(engine, prompts, params) == expected
            pairs = zip(prompts, expected, strict=True)
            prompts = [[*prompt, *said, *drawn(draw, 7)] for prompt, said in pairs]
        (domain,) = engine.load().domains
        assert domain.prefix_hits > kept or not kept
        assert domain.preemptions > 0 or {"dp", "all-to-all"} & {*layout.split()}
        assert (0 < counted.held < counted.drafted) == drafts
        assert engine.compilations_after_ready == 0
        host = engine.load().host_pages
        assert (host.get("hits", 0) > 0) == ("host" in layout)
        assert (host.get("storage_hits", 0) > 0) == ("folder" in layout)


def test_drafts_of_the_prediction_module(tmp_path):
    folder = replace(QWEN3_NEXT, sizes=replace(QWEN3_NEXT.sizes, module=True)).write(tmp_path)
    stepped = Sequences(loaded(folder, **LAYOUTS["drafts, colocated"]), questions())
    stepped.in_chunks(25)
    assert [stepped.drafts[number] for number in range(3)] == ENTRIES["drafts"]


SIZES = [({}, {}), ({"attention.tp": 4}, {"cache.page_size": 16, "scheduler.page_buckets": [16]})]


@pytest.mark.parametrize(("first", "second"), SIZES)
def test_hand_off(folder, first, second):
    """The state crosses once, behind the last page."""
    prompts = [*talks(random.Random(5)), *questions()]
    limits = LIMITS | {"scheduler.slots": 3}
    with hand_offs.workers(folder, prefill=limits | first, decode=limits | second) as engines:
        hand_offs.check_handed_over(*engines, prompts, GREEDY)


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
