"""BF16 matrices beside FP32 activations give the bits of the same matrices in FP32."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from jaxserve.engine.request import SamplingParams
from tests.jaxserve import layouts
from tests.reference.tiny_step3 import write_tiny_step3

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=20)
IN_FLOAT32 = {"attention.weights": "float32", "ffn.weights": "float32"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bfloat16")
    sizes = dataclasses.replace(layouts.SIZES, num_hidden_layers=2, moe_layers=(1,))
    return write_tiny_step3(path, sizes, seed=layouts.SEED, dtype="bfloat16")


def answers(folder: Path, overrides: dict[str, Any]) -> list[Any]:
    """Log-probabilities of each prompt's tokens, and of the 20 likeliest at each place."""
    collector = layouts.Collector()
    with layouts.running(folder, overrides) as engine:
        names = [collector.submit(engine, prompt, GREEDY) for prompt in layouts.PROMPTS[:6]]
        collector.wait()
    return [[news.logprobs for news in collector.outputs(name)] for name in names]


# Optimised: without, LLVM does not add and multiply in one instruction everywhere. The colocated
# step has all products, divided both ways, in one program, where most can be fused.
@pytest.mark.parametrize(
    "layout",
    [
        layouts.COLOCATED | {"attention.tp": 2},
        pytest.param({"attention.dp": 2, "ffn.ep": 2}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_bits_are_those_of_float32_weights(folder: Path, layout: dict[str, Any]) -> None:
    kept, widened = answers(folder, layout), answers(folder, layout | IN_FLOAT32)
    assert [sum(map(len, answer)) for answer in kept] == [6] * 6
    assert kept == widened
