"""Steps of both roles as one program give the colocated tokens."""

import pytest

from jaxserve.errors import ConfigError
from jaxserve.fleet.assembly import build_runtime
from tests.jaxserve import layouts
from tests.jaxserve.layout_process import crowded, move

pytestmark = pytest.mark.unoptimised

CASES = [
    (1, {"speculative.method": "ngram"}),
    (2, {"attention.tp": 2, "ffn.tp": 2, "cache.pages": 24, "cache.host_gb": 0.02}),
    (2, {"attention.dp": 4, "ffn.ep": 2, "ffn.tp": 2, "ffn.redundant_slots": 1}),
    (3, {"attention.dp": 2, "ffn.ep": 2, "ffn.redundant_slots": 1, "ffn.exchange": "alltoall"}),
]


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


def test_meshes_without_common_axes_are_refused(tiny_model):
    sizes = {"pipeline": "step", "attention.tp": 2, "ffn.ep": 2}
    with pytest.raises(ConfigError, match=r"attention.tp = 2 must be 1 or ffn.tp = 1; start a pr"):
        build_runtime(layouts.deployment(tiny_model, sizes))
