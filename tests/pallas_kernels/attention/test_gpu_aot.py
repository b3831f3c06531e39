"""The Hopper kernels compile for an H200, with what registers and shared memory it has."""

import json
import os
import subprocess
import sys

import pytest

from pallas_kernels import gpu_resources
from pallas_kernels.attention.gpu_cases import cases

SPILLING = ("deepseek-v3",)
"""Their sums alone take half of the registers; the compiler moves some others to local memory."""


@pytest.mark.gpu_aot
@pytest.mark.skipif(gpu_resources.plugin() is None, reason="needs JAX's CUDA wheels")
@pytest.mark.parametrize("case", [case.name for case in cases()])
def test_registers_and_shared_memory(case):
    command = [sys.executable, "-m", "pallas_kernels.gpu_resources", "--json"]
    done = subprocess.run(
        [*command, "--op", "attention", "--case", case],
        env={key: value for key, value in os.environ.items() if not key.startswith("JAX_COMPIL")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [kernel["kernel"] for kernel in kernels] == [
        "paged_attention",
        "paged_attention_combine",
    ]
    for kernel in kernels:
        assert kernel["shared_memory"] <= 232_448
        assert kernel["registers"] <= 255
        if not case.startswith(SPILLING):
            assert kernel["spilled_bytes"] == 0
