"""The Hopper kernels compile for an H200, with what registers and shared memory it has."""

import pytest

from pallas_kernels.attention.gpu_cases import cases
from tests.pallas_kernels import gpu_aot

pytestmark = [pytest.mark.gpu_aot, gpu_aot.NEEDS_CUDA, pytest.mark.timeout(gpu_aot.SECONDS)]


@pytest.mark.parametrize("case", [case.name for case in cases()])
def test_registers_and_shared_memory(case):
    """Two warpgroups have 255 registers a thread."""
    names = ("paged_attention", "paged_attention_combine")
    gpu_aot.check("attention", case, names, registers=255)
