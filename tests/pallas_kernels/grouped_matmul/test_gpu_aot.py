"""The Hopper kernel compiles for an H200 at the sizes of real models, with what the H200 has."""

import json
import os
import subprocess
import sys

import pytest

from pallas_kernels import gpu_resources
from pallas_kernels.grouped_matmul.gpu_cases import cases


@pytest.mark.gpu_aot
@pytest.mark.skipif(gpu_resources.plugin() is None, reason="needs JAX's CUDA wheels")
@pytest.mark.parametrize("case", [case.name for case in cases()])
def test_registers_and_shared_memory(case):
    """Gate and up in one pass, then down; 3 warpgroups leave 168 registers a thread."""
    command = [sys.executable, "-m", "pallas_kernels.gpu_resources", "--json"]
    done = subprocess.run(
        [*command, "--op", "grouped_matmul", "--case", case],
        env={key: value for key, value in os.environ.items() if not key.startswith("JAX_COMPIL")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [kernel["kernel"] for kernel in kernels] == ["grouped_kernel"] * 2
    for kernel in kernels:
        assert kernel["spilled_bytes"] == 0
        assert kernel["registers"] <= 168
        assert kernel["shared_memory"] <= 232_448
