"""Same tokens: the families on the layouts of AFD, in FP32 and with 8 bits in every place.

FP32 is compared with the reference's greedy tokens (`tests/reference/golden/`); with weights, cache
and wire in 8 bits AFD gives the tokens of the colocated run that rounds at the same places. Step-3
has `test_layouts.py`. `make test` runs a few, the marker `matrix` all of them.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from jaxserve.engine.request import SamplingParams
from jaxserve.llm import LLM
from tests.jaxserve.layouts import LAYOUTS
from tests.reference.catalogue import CATALOGUE
from tests.reference.make_golden import GOLDEN, OUTPUT_TOKENS
from tests.reference.tiny_models import prompts

pytestmark = pytest.mark.unoptimised

MODELS = ("deepseek_v3", "qwen3_moe", "qwen3_window")
"""MLA and experts, GQA and experts, GQA with a window and no experts."""

EXCHANGES = ("gather", "alltoall")

GREEDY = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0, ignore_eos=True)

LIMITS: dict[str, Any] = {
    "mode": "afd",
    "dtype": "float32",
    "cache.page_size": 8,
    "cache.pages": 40,
    "scheduler.slots": 3,
    "scheduler.max_length": 64,
    "scheduler.token_budget": 16,
    "scheduler.token_buckets": [16],
    "scheduler.page_buckets": [8],
}
"""One bucket; the longest prompt is cut into chunks."""


def tokens(folder: Path, overrides: dict[str, Any]) -> list[list[int]]:
    """What a deployment generates after the prompts of the golden files."""
    with LLM(folder, overrides=LIMITS | overrides) as llm:
        return [output.token_ids for output in llm.generate(prompts(), GREEDY)]


FEW = [
    ("deepseek_v3", "2A4F", "alltoall"),
    ("qwen3_moe", "3A2F", "alltoall"),
    ("qwen3_window", "1A2F tp", "gather"),
]
"""Those that are not in `test_parity.py` (2A2F, gather) in another form."""

ALL = [
    (model, layout, exchange)
    for model, layout, exchange in itertools.product(MODELS, LAYOUTS, EXCHANGES)
    if exchange == "gather" or ("ffn.ep" in LAYOUTS[layout] and model != "qwen3_window")
]


def check(name: str, layout: str, exchange: str, folder: Path) -> None:
    CATALOGUE[name].write(folder)
    got = tokens(folder, LAYOUTS[layout] | {"lanes": 2, "ffn.exchange": exchange})
    assert got == load_file(GOLDEN / f"{name}.safetensors")["tokens"].tolist()


@pytest.mark.parametrize(("name", "layout", "exchange"), FEW)
def test_layout_gives_the_references_tokens(name: str, layout: str, exchange: str, tmp_path: Path):
    check(name, layout, exchange, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "layout", "exchange"), ALL)
def test_every_layout_gives_the_references_tokens(
    name: str, layout: str, exchange: str, tmp_path: Path
):
    check(name, layout, exchange, tmp_path)


def test_the_few_are_of_the_product():
    assert set(FEW) <= set(ALL)
    assert len(ALL) == 24
    assert {name for name, _, _ in FEW} == set(MODELS)


def eight_bits(format: str) -> dict[str, Any]:
    """Every place that can be in 8 bits."""
    places = ("attention.weights", "ffn.weights", "cache.format", "link.dispatch")
    return dict.fromkeys(places, format)


def check_eight_bits(name: str, format: str, tp: int, folder: Path) -> None:
    """A device of colocated mode is one of each role, so that sums are cut alike."""
    model = CATALOGUE[name].write(folder)
    shared = eight_bits(format) | {"attention.tp": tp}
    colocated = tokens(model, shared | {"mode": "colocated"})
    assert tokens(model, shared | {"ffn.tp": tp, "lanes": 2}) == colocated
    plain = load_file(GOLDEN / f"{name}.safetensors")["tokens"].tolist()
    assert colocated != plain, f"{format} changes nothing"


def test_8_bits_are_the_colocated_run_that_rounds_at_the_same_places(tmp_path: Path):
    check_eight_bits("deepseek_v3", "fp8", 1, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("format", ["fp8", "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_8_bits_of_every_family(name: str, format: str, tp: int, tmp_path: Path):
    check_eight_bits(name, format, tp, tmp_path)
