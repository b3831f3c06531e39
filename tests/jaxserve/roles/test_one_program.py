"""Steps of both roles as one program give the colocated tokens."""

import pytest

from jaxserve.errors import ConfigError
from jaxserve.fleet.assembly import build_runtime
from tests.jaxserve import layouts
from tests.jaxserve.layout_process import as_on_tpus, crowded, move
from tests.jaxserve.test_layouts_processes import run
from tests.reference.tiny_step3 import TinyStep3, write_tiny_step3

pytestmark = pytest.mark.unoptimised

CASES = [
    (1, {"speculative.method": "ngram"}),
    (2, {"attention.tp": 2, "ffn.tp": 2, "cache.pages": 24, "cache.host_gb": 0.02}),
    (2, {"attention.dp": 4, "ffn.ep": 2, "ffn.tp": 2, "ffn.redundant_slots": 1}),
    (3, {"attention.dp": 2, "ffn.ep": 2, "ffn.redundant_slots": 1, "ffn.exchange": "alltoall"}),
]
EIGHT_BITS = dict.fromkeys(("attention.weights", "ffn.weights", "cache.format"), "int8")
HALVES = {"attention.dp": 2, "ffn.ep": 2, "ffn.processes": 2}
POOLED = [
    (1, {}, {"attention.dp": 2, "ffn.tp": 2, "speculative.method": "ngram"}),
    (2, {}, {"attention.dp": 2, "ffn.ep": 2, "ffn.redundant_slots": 1}),
    (3, EIGHT_BITS, {}),
    pytest.param(3, {}, HALVES | {"attention.processes": 2}, marks=pytest.mark.multihost),
]
"""Lanes, formats, and a layout; in 8 bits, sums are cut as in colocated mode."""
WHOLE_TILES = TinyStep3(
    vocab_size=161,
    hidden_size=128,
    head_dim=128,
    moe_intermediate_size=256,
    share_expert_dim=42,
    moe_num_experts=8,
)
PAGES = {"cache.page_size": 32, "scheduler.page_buckets": [5], "cache.pages": 7}


@pytest.mark.nightly
@pytest.mark.parametrize(("lanes", "sizes"), CASES)
def test_the_tokens_are_the_colocated_ones(lanes, sizes, tiny_model, reference):
    """With few pages requests are preempted and one is cancelled; experts move while steps run."""
    overrides = {"pipeline": "step", "lanes": lanes, "ffn.exchange": "gather"} | sizes
    overrides |= {"experts.move_gb_per_second": 10.0}
    with layouts.running(tiny_model, overrides) as engine:
        if "ffn.redundant_slots" in sizes:
            move(engine, fails=False)
        tokens = crowded(engine) if "cache.pages" in sizes else layouts.generate(engine)
        again = layouts.generate(engine)  # with cached prefixes
        assert engine.compilations_after_ready == 0
        assert not engine.host_pages or engine.host_pages["bytes_restored"] > 0
    layouts.check(reference, tokens, sizes)
    layouts.check(reference, again, sizes)


@pytest.mark.nightly
@pytest.mark.parametrize(("lanes", "formats", "sizes"), POOLED)
def test_pages_and_experts_share_memory_as_on_tpus(lanes, formats, sizes, tmp_path):
    """Each of two pools has one of the two layers with experts. Requests are preempted, and one is
    cancelled. Two processes have half of each role."""
    folder, overrides = write_tiny_step3(tmp_path, WHOLE_TILES, seed=layouts.SEED), PAGES | formats
    with layouts.running(folder, overrides | layouts.COLOCATED) as engine:
        expected = layouts.generate(engine)
    overrides |= {"pipeline": "step", "lanes": lanes, "ffn.exchange": "gather"} | sizes
    if "ffn.processes" in sizes:
        found = run(folder, overrides, 2, tmp_path, "--as-on-tpus", "--crowded")
        assert found.tokens == expected
        return
    with as_on_tpus(), layouts.running(folder, overrides) as engine:
        assert crowded(engine) == expected
        assert layouts.generate(engine) == expected  # with cached prefixes
        assert engine.compilations_after_ready == 0


def test_meshes_without_common_axes_are_refused(tiny_model):
    sizes = {"pipeline": "step", "attention.tp": 2, "ffn.ep": 2}
    with pytest.raises(ConfigError, match=r"attention.tp = 2 must be 1 or ffn.tp = 1; start a pr"):
        build_runtime(layouts.deployment(tiny_model, sizes))
