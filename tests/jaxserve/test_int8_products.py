"""Attention in INT8 in some of a model's layers: every layout has the same tokens."""

import pytest

from jaxserve.checkpoint.int8_products import read_model
from jaxserve.commands.kernel_coverage import kernel_gaps
from jaxserve.engine.request import SamplingParams
from tests.jaxserve import layouts

pytestmark = pytest.mark.unoptimised

LAYERS = {"attention.int8_products": [0, 2], "cache.format": "int8"}
PROMPTS = layouts.PROMPTS[1:4]
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


def test_layouts_have_the_tokens_of_colocated_mode(tiny_model):
    found = []
    for overrides in ({"mode": "colocated"}, {"mode": "afd"}):
        with layouts.running(tiny_model, LAYERS | overrides) as engine:
            found.append(layouts.generate(engine, PROMPTS, GREEDY))
    assert found[0] == found[1]


@pytest.mark.parametrize("mode", ["afd", "colocated"])
def test_it_is_in_the_programs_and_hopper_has_no_kernel(tiny_model, mode):
    def gaps(overrides):
        deployment = layouts.deployment(tiny_model, {"mode": mode, **overrides})
        slow, _ = kernel_gaps(read_model(deployment)[0], deployment, {"attention": "NVIDIA H200"})
        return [text for text in slow if "paged_attention" in text]

    assert any("for products in INT8; plain XLA" in text for text in gaps(LAYERS))
    assert not any("products" in text for text in gaps({"cache.format": "int8"}))
