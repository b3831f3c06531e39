"""The Hopper kernels compile for an H200 at the sizes of real models, with what the H200 has."""

import pytest

from pallas_kernels.rotate_and_write.gpu_cases import cases
from tests.pallas_kernels import gpu_aot

pytestmark = [pytest.mark.gpu_aot, gpu_aot.NEEDS_CUDA, pytest.mark.timeout(gpu_aot.SECONDS)]


@pytest.mark.parametrize("case", [case.name for case in cases()])
def test_registers_and_shared_memory(case):
    kernel = "norm_and_write" if case.startswith("deepseek") else "rotate_and_write"
    gpu_aot.check("rotate_and_write", case, (kernel,), registers=255)
