"""Steps of both roles as one program give the colocated tokens."""

import contextlib

import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.fleet.assembly import build_runtime
from tests.jaxserve import layouts
from tests.jaxserve.layout_process import as_on_tpus, await_moves, crowded, move
from tests.jaxserve.test_layouts_processes import run
from tests.reference.tiny_models import TinyModel
from tests.reference.tiny_sizes import VOCAB, TinyDeepseek, TinyGptOss
from tests.reference.tiny_step3 import TinyStep3, write_tiny_step3

pytestmark = pytest.mark.unoptimised

EIGHT_BITS = dict.fromkeys(("attention.weights", "ffn.weights", "cache.format"), "int8")
MOVED = {
    "ffn.redundant_slots": 1,
    "experts.move_gb_per_second": 10.0,
    "experts.move_mb_per_step": 0.05,
    "experts.least_gain": 0.0,
}
TWO_RANKS = {"attention.dp": 2, "ffn.ep": 2} | MOVED
HALVES = TWO_RANKS | {"attention.processes": 2, "ffn.processes": 2}
FEW = {"attention.tp": 2, "ffn.tp": 2, "cache.pages": 24, "cache.host_gb": 0.02}
PAGES = {"cache.page_size": 32, "scheduler.page_buckets": [5], "cache.pages": 7}
LATENTS = {"cache.page_size": 128, "scheduler.page_buckets": [2], "cache.pages": 5}
LATENTS |= {"scheduler.max_length": 192}
ROTATED, WINDOWS = LATENTS | {"cache.format": "int8", "cache.rope": "bfloat16"}, {**PAGES}
CASES = [
    (3, {}, {"speculative.method": "ngram"}),
    (2, {}, FEW),
    (2, {}, {"attention.dp": 4, "ffn.ep": 2, "ffn.tp": 2} | MOVED),
    (3, {}, TWO_RANKS | {"ffn.exchange": "alltoall"}),
    (1, PAGES, {"attention.dp": 4, "ffn.ep": 2, "ffn.tp": 2} | MOVED),
    (2, PAGES, {"attention.tp": 2, "ffn.ep": 2, "speculative.method": "ngram"} | MOVED),
    (3, PAGES | EIGHT_BITS, {}),
    (3, PAGES | EIGHT_BITS, TWO_RANKS),
    pytest.param(3, PAGES, HALVES, marks=pytest.mark.multihost),
    (3, LATENTS, TWO_RANKS | {"speculative.method": "mtp", "speculative.automatic": False}),
    (2, ROTATED, TWO_RANKS),
    (3, WINDOWS, {"speculative.method": "ngram"}),
]
"""Lanes, pages and formats, and a layout. With pages of whole tiles the programs are those of TPUs,
where pages and experts share memory. In 8 bits sums of other experts are rounded otherwise: tokens
are the same where sums are cut as in colocated mode, and where experts are back."""
WIDE = {"hidden_size": 128, "moe_intermediate_size": 256}
WHOLE_TILES = TinyStep3(vocab_size=161, head_dim=128, share_expert_dim=42, **WIDE)
WIDE_HEADS = WIDE | {"qk_nope_head_dim": 128}
GPT_OSS = TinyModel("windows", TinyGptOss(hidden_size=128, intermediate_size=256, head_dim=128))
DEEPSEEK = TinyModel("whole tiles", TinyDeepseek(num_nextn_predict_layers=1, **WIDE_HEADS))


@pytest.mark.nightly
@pytest.mark.parametrize(("lanes", "given", "sizes"), CASES)
def test_the_tokens_are_the_colocated_ones(lanes, given, sizes, tiny_model, tmp_path):
    """Experts move while requests run. With few pages requests are preempted and one is cancelled.
    Each of two pools has one of Step-3's two layers with experts, DeepSeek's one pool both. Half of
    gpt-oss's layers have a window. Two processes have half of each role."""
    folder, prompts = tiny_model, layouts.PROMPTS
    platform = as_on_tpus() if given else contextlib.nullcontext()
    if "scheduler.max_length" in given:
        folder = DEEPSEEK.write(tmp_path)
        few = layouts.prompts_below(VOCAB)  # all of which outgrow a page
        prompts = [(99 * prompt)[: 100 + n] for n, prompt in enumerate(few)]
    elif given is WINDOWS:
        folder, prompts = GPT_OSS.write(tmp_path), layouts.prompts_below(VOCAB)
    elif given:
        folder = write_tiny_step3(tmp_path, WHOLE_TILES, seed=layouts.SEED)
    with layouts.running(folder, given | layouts.COLOCATED) as engine:
        expected = layouts.generate(engine, prompts)
    overrides = given | {"pipeline": "step", "lanes": lanes, "ffn.exchange": "gather"} | sizes
    if "ffn.processes" in sizes:
        found = run(folder, overrides, 2, tmp_path, "--as-on-tpus", "--crowded", "--moving")
        assert found.tokens == expected
        assert found.view["experts"]["moves"] > 20
        return
    with platform, layouts.running(folder, overrides) as engine:
        if "ffn.redundant_slots" in sizes:
            home, alike = dict(engine.experts.placements), EIGHT_BITS.keys() - given.keys()
            expected = expected if alike else layouts.generate(engine, prompts)
            move(engine, prompts, fails=False, expected=expected if alike else None)
            check_counts(engine, prompts)
            if not alike:
                engine.experts.place(home)
                await_moves(engine, prompts)
        generate = crowded if "cache.pages" in overrides else layouts.generate
        assert generate(engine, prompts) == expected
        assert layouts.generate(engine, prompts) == expected  # with cached prefixes
        assert engine.compilations_after_ready == 0
        assert not engine.host_pages or engine.host_pages["bytes_restored"] > 0


def check_counts(engine, prompts):
    """Each rank counts tokens for the experts in its slots, and every layer all tokens."""
    before = tokens_of_ranks(engine)
    layouts.generate(engine, prompts)
    totals = set()
    for layer, tokens in tokens_of_ranks(engine).items():
        slots = np.split(np.array(engine.experts.placements[layer]), len(tokens))
        for own, new in zip(slots, tokens - before[layer], strict=True):
            assert new.any()
            assert set(np.flatnonzero(new)) <= set(own)
        totals.add((tokens - before[layer]).sum())
    assert len(totals) == 1


def tokens_of_ranks(engine):
    engine.experts.rebalance(dry_run=True, seconds=60)
    return dict(engine.experts._totals)


def test_meshes_without_common_axes_are_refused(tiny_model):
    sizes = {"pipeline": "step", "attention.tp": 4, "ffn.ep": 2, "ffn.tp": 2}
    with pytest.raises(ConfigError, match=r"attention.tp = 4 and ffn.tp = 2: one must be 1, or bo"):
        build_runtime(layouts.deployment(tiny_model, sizes))
