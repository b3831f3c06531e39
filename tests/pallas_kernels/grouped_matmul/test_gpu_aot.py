"""The Hopper kernel compiles for an H200 at the sizes of real models, with what the H200 has."""

import pytest

from pallas_kernels.grouped_matmul.gpu_cases import around, cases
from tests.pallas_kernels import gpu_aot

pytestmark = [pytest.mark.gpu_aot, gpu_aot.NEEDS_CUDA, pytest.mark.timeout(gpu_aot.SECONDS)]


AROUND = [case.name for case in around()]


@pytest.mark.parametrize("case", [case.name for case in cases() if case.name not in AROUND])
def test_registers_and_shared_memory(case):
    """Gate and up in one pass, then down. 3 warpgroups leave 168 registers a thread; 2, which some
    and many rows in 8-bit blocks have, as many as a thread can have."""
    many = ("rows 384", "rows 2048", "rows 3072", "rows 16384")
    registers = 255 if case.endswith(many) else 168
    gpu_aot.check("grouped_matmul", case, ("grouped_kernel",), registers)


@pytest.mark.parametrize("case", AROUND)
def test_what_is_around_experts(case):
    """A block is a row, or some choices, and a multiprocessor holds 4 of them; 2 where few rows
    have many parts, which are all loaded at once."""
    name, _ = case.split()
    gpu_aot.check("grouped_matmul", case, (name,), 255 if name == "sum_and_pack" else 128)
