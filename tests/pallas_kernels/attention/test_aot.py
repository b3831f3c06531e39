"""Decode steps of real models compile for every TPU generation, and copy no pool of pages."""

import json
import subprocess
import sys

import pytest

from pallas_kernels import aot
from pallas_kernels.attention.cases import cases

pytestmark = pytest.mark.tpu_aot

MOST_TEMPORARY_BYTES = 32 * 2**20
"""Queries and results of a step of DeepSeek-V3 are 19 MB, the smallest pool is 67 MB."""


@pytest.mark.parametrize("generation", aot.GENERATIONS)
def test_real_models_compile(generation):
    pytest.importorskip("libtpu")
    eight_bits = "fp8" if generation == "v7x" else "int8"
    names = [
        f"step3 {eight_bits}",
        "deepseek-v3 bf16",
        "qwen3-235b bf16",
        f"step3 {eight_bits} write",
        "deepseek-v3 bf16 write",
        f"qwen3-235b {eight_bits} write",
    ]
    # libtpu is loaded with its own settings, in a process of its own.
    done = subprocess.run(
        [sys.executable, "-m", "pallas_kernels.aot", "attention", generation, *names],
        env=aot.environment(),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {result["case"] for result in results} == set(names)
    for result in results:
        assert result["temporary_bytes"] < MOST_TEMPORARY_BYTES, result


def test_cases_have_different_names():
    names = [case.name for case in cases("v6e")]
    assert len(set(names)) == len(names) == 20
