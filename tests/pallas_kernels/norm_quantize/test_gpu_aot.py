"""The Hopper kernel compiles for an H200 at the widths of real models, with what the H200 has."""

import pytest

from pallas_kernels.norm_quantize.gpu_cases import cases
from tests.pallas_kernels import gpu_aot

pytestmark = [pytest.mark.gpu_aot, gpu_aot.NEEDS_CUDA, pytest.mark.timeout(gpu_aot.SECONDS)]


@pytest.mark.parametrize("case", [case.name for case in cases()])
def test_registers_and_shared_memory(case):
    """A row in the registers of 128 threads."""
    gpu_aot.check("norm_quantize", case, ("rms_norm_quantize",), registers=255)
