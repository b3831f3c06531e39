"""Same tokens: the families on the layouts of AFD, in FP32 and with 8 bits in every place.

FP32 is compared with the reference's greedy tokens (`tests/reference/golden/`); with weights, cache
and wire in 8 bits AFD gives the tokens of the colocated run that rounds at the same places. Step-3
has `test_layouts.py`. `make test` runs a few, the marker `matrix` all of them.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.jaxserve.layouts import LAYOUTS
from tests.jaxserve.test_parity import CHUNKED, Expected, llm_tokens
from tests.reference.catalogue import CATALOGUE

pytestmark = pytest.mark.unoptimised

MODELS = ("deepseek_v3", "qwen3_moe", "qwen3_window")
"""MLA and experts, GQA and experts, GQA with a window and no experts."""

EXCHANGES = ("gather", "alltoall")


def tokens(folder: Path, overrides: dict[str, Any]) -> list[list[int]]:
    """Tokens that a deployment generates after the prompts of the golden files."""
    return llm_tokens(folder, CHUNKED | overrides)


FEW = [
    ("deepseek_v3", "2A4F", "alltoall"),
    ("qwen3_moe", "3A2F", "alltoall"),
    ("qwen3_window", "1A2F tp", "gather"),
]
"""Layouts that `test_parity.py` (2A2F, gather) does not have in another form."""

ALL = [
    (model, layout, exchange)
    for model, layout, exchange in itertools.product(MODELS, LAYOUTS, EXCHANGES)
    if exchange == "gather" or ("ffn.ep" in LAYOUTS[layout] and model != "qwen3_window")
]


@pytest.mark.parametrize(
    ("name", "layout", "exchange"),
    [pytest.param(*case, marks=[pytest.mark.matrix] * (case not in FEW)) for case in ALL],
)
def test_every_layout_gives_the_references_tokens(name, layout, exchange, tmp_path):
    CATALOGUE[name].write(tmp_path)
    got = tokens(tmp_path, LAYOUTS[layout] | {"lanes": 2, "ffn.exchange": exchange})
    assert got == Expected.golden(name).tokens


def eight_bits(format: str) -> dict[str, Any]:
    """Every place that can be in 8 bits."""
    places = ("attention.weights", "ffn.weights", "cache.format", "link.dispatch")
    return dict.fromkeys(places, format)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("format", ["fp8", pytest.param("int8", marks=pytest.mark.matrix)])
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.matrix] * (name != MODELS[0])) for name in MODELS],
)
def test_8_bits_are_the_colocated_run_that_rounds_at_the_same_places(name, format, tp, tmp_path):
    """A device of colocated mode is one of each role, so that sums are cut alike."""
    model = CATALOGUE[name].write(tmp_path)
    shared = eight_bits(format) | {"attention.tp": tp}
    colocated = tokens(model, shared | {"mode": "colocated"})
    assert tokens(model, shared | {"ffn.tp": tp, "lanes": 2}) == colocated
    assert colocated != Expected.golden(name).tokens, f"{format} changes nothing"
