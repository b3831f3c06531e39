"""The Hopper kernels compile for an H200 at the sizes of real models, with what the H200 has."""

import functools
import json
import os

import pytest

from pallas_kernels import gpu_resources
from pallas_kernels.grouped_matmul import cases as grouped_matmul
from tests.pallas_kernels import gpu_aot

pytestmark = gpu_aot.COMPILED

CASES = [(op, case.name) for op in gpu_resources.OPS for case in gpu_resources.cases(op)]
AROUND = [case.name for case in grouped_matmul.around()]
SHARED_MEMORY = 232_448


@functools.cache
def kernels_of(op):
    """The kernels of all cases, compiled in one process: {case: [{"kernel": name, ...}, ...]}."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("JAX_COMPIL")}
    found = {}
    for line in gpu_aot.lines_of("pallas_kernels.gpu_resources", "--json", "--op", op, env=env):
        if line.startswith("{"):
            kernel = json.loads(line)
            found.setdefault(kernel["case"], []).append(kernel)
    return found


def names_and_registers(op, case):
    """Kernels that a case may have, and the registers of a thread."""
    if case in AROUND:
        # A block is a row, or some choices, and a multiprocessor holds 4 of them; 2 where few rows
        # have many parts, which are all loaded at once.
        name, _ = case.split()
        return {name}, 255 if name == "sum_and_pack" else 128
    if op == "grouped_matmul":
        # Gate and up in one pass, then down. 3 warpgroups leave 168 registers a thread; 2, which
        # some and many rows in 8-bit blocks have, as many as a thread can have.
        many = ("rows 384", "rows 2048", "rows 3072", "rows 16384", "output fp8_block 2048")
        return {"grouped_kernel"}, 255 if case.endswith(many) else 168
    if op == "rotate_and_write":
        return {"norm_and_write" if case.startswith("deepseek") else "rotate_and_write"}, 255
    if op in ("gated_delta", "norm_quantize", "sparse_attention"):
        return {"rms_norm_quantize", "quantize_rows", "delta_step", "index_scores"}, 255
    return {"paged_attention", "paged_attention_combine"}, 255


@pytest.mark.parametrize(("op", "case"), CASES)
def test_registers_and_shared_memory(op, case):
    """Nothing is in slow memory or more than there is.

    Code that an earlier case has, too, is not compiled again.
    """
    names, registers = names_and_registers(op, case)
    for kernel in kernels_of(op)[case]:
        assert kernel["kernel"] in names, kernel
        assert kernel["spilled_bytes"] == 0, kernel
        assert not kernel["losses"], kernel
        assert kernel["registers"] <= registers, kernel
        assert kernel["shared_memory"] <= SHARED_MEMORY, kernel
