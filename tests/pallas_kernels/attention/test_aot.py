"""Batches of real models compile for every TPU generation, and copy no pool of pages."""

import json
import subprocess
import sys

import pytest

from pallas_kernels import aot
from pallas_kernels.attention.cases import cases

pytestmark = pytest.mark.tpu_aot

SMALL = 32 * 2**20
"""Bytes: the smallest pool of pages is twice that."""

SPAN = {
    "v5e": ("step3 int8", "deepseek-v3 bf16 write"),
    "v6e": ("qwen3-235b-tp4 bf16 2 tokens", "deepseek-v3 int8 write", "step3 int8 layer"),
    "v7x": ("step3 fp8", "qwen3-235b fp8 chunk", "deepseek-v3-tp8 bf16 inside", "step3 fp8 layer"),
}
"""Every kind of batch and kernel, each with some generation. `-m nightly` has the product."""

MOST_CYCLES = 60_000
"""By XLA's estimate beside the kernel. Where scales are moved, v6e has 209 thousand, v7x 81."""


def most_temporary_bytes(case):
    """Queries and results may be laid out anew, with some padding; pages may not."""
    if case.name.endswith(("write", "layer")):
        return SMALL
    rows = case.arguments[:3] if case.name.endswith("inside") else case.arguments[:1]
    return 2.2 * sum(array.size * array.dtype.itemsize for array in rows) + SMALL


def compile_in_a_process(generation, names, limit):
    """libtpu is loaded with its own settings, in a process of its own."""
    pytest.importorskip("libtpu")
    done = subprocess.run(
        [sys.executable, "-m", "pallas_kernels.aot", "attention", generation, *names],
        env=aot.environment(),
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    known = {case.name: case for case in cases(generation)}
    assert {result["case"] for result in results} == set(names or known)
    for result in results:
        most = most_temporary_bytes(known[result["case"]])
        assert result["temporary_bytes"] < most, (result, most)
        if result["case"].endswith("layer"):
            assert result["estimated_cycles"] < MOST_CYCLES


@pytest.mark.parametrize("generation", aot.GENERATIONS)
def test_models_compile(generation):
    compile_in_a_process(generation, SPAN[generation], 500)


@pytest.mark.nightly
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("generation", aot.GENERATIONS)
def test_all_models_compile(generation):
    compile_in_a_process(generation, (), 5000)


def test_cases_have_different_names():
    for generation, count in (("v6e", 75), ("v7x", 97)):
        names = [case.name for case in cases(generation)]
        assert len(set(names)) == len(names) == count
