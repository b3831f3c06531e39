"""Batches of real models compile for every TPU generation, and copy no pool of pages."""

import pytest

from pallas_kernels import aot
from pallas_kernels.attention.cases import cases
from tests.pallas_kernels.gpu_aot import compiled_cases

pytestmark = pytest.mark.tpu_aot

SMALL = 32 * 2**20
"""Bytes: the smallest pool of pages is twice that."""

SPAN = {
    "v5e": ("16 heads x 128 bf16", "deepseek-v3 bf16 write"),
    "v6e": (
        *("qwen3-8b bf16 chunk", "deepseek-v3 int8 write", "step3 int8 layer"),
        "deepseek-v4 bf16 rows, pages of 256",
    ),
    "v7x": ("step3 fp8", "qwen3-8b fp8 chunk", "deepseek-v3-tp8 bf16 inside", "step3 fp8 layer"),
}
"""Every kind of kernel, each with some generation, and of those with 8 KV heads or more one with
each. `-m nightly` has the product."""

MOST_CYCLES = 60_000
"""Cycles beside the kernel, by XLA's estimate. Where scales are moved, v6e has 209 thousand, v7x
81."""


def most_temporary_bytes(case):
    """Limits temporaries to new layouts of queries and results; pages must not be copied.

    The kernel takes multiples of 16 query heads of every KV head, and of 128 columns.
    """
    if case.name.endswith(("write", "layer")):
        return SMALL
    if "rows" in case.name:  # 17 MB of them, and on v7x again where two lie in a tile
        return 36e6
    rows, kv_heads = case.arguments[:3], None
    if not case.name.endswith("inside"):
        rows, kv_heads = case.arguments[:1], case.arguments[1][0].shape[1]
    size = 0
    for tokens, heads, width in (array.shape for array in rows):
        if kv_heads is not None:
            heads, width = -(-heads // kv_heads // 16) * 16 * kv_heads, -(-width // 128) * 128
        size += 2 * tokens * heads * width
    return 2.2 * size + SMALL


def check(generation, names=(), limit=5000):
    known = {case.name: case for case in cases(generation)}
    assert len(known) == len(cases(generation))
    found = compiled_cases("attention", generation, *names, limit=limit)
    assert set(found) == set(names or known)
    for name, result in found.items():
        assert result["temporary_bytes"] < (most := most_temporary_bytes(known[name])), (name, most)
        assert result["estimated_cycles"] < MOST_CYCLES or not name.endswith("layer")


@pytest.mark.parametrize("generation", aot.GENERATIONS)
def test_models_compile(generation):
    check(generation, SPAN[generation], 500)


@pytest.mark.nightly
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("generation", aot.GENERATIONS)
def test_all_models_compile(generation):
    check(generation)
