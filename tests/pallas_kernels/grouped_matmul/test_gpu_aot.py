"""The Hopper kernel compiles for an H200 at the sizes of real models, without spilled registers."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.grouped_matmul import grouped_swiglu
from pallas_kernels.grouped_matmul.shapes import SHAPES
from pallas_kernels.quantize import QuantArray
from tests.pallas_kernels.hopper import SHARED_MEMORY, compile_kernels, h200_mesh

pytestmark = pytest.mark.gpu_aot

FORMATS = {
    "bf16": (jnp.bfloat16, None),
    "int8": (jnp.int8, (1, 0)),
    "fp8": (jnp.float8_e4m3fn, (1, 0)),
    "fp8_block": (jnp.float8_e4m3fn, (128, 128)),
}
# Few rows an expert (the smallest tiles), a decode step, and prefill (the largest tiles).
TOKENS = {"step3_2a2f": (128, 512, 16384), "deepseek_v3_ep32": (16384,)}
CASES = [
    *((name, format, tokens) for name in TOKENS for format in FORMATS for tokens in TOKENS[name]),
    ("step3", "fp8_block", 2048),
    ("step3_2a2f_shared", "bf16", 2048),
    ("qwen3_235b", "fp8", 512),
    ("qwen3_235b_ep8", "int8", 16384),
]


def weights_shape(format, groups, d_out, d_in):
    dtype, block = FORMATS[format]
    values = jax.ShapeDtypeStruct((groups, d_out, d_in), dtype)
    if block is None:
        return values
    counts = [-(-axis // (size or axis)) for axis, size in zip((d_out, d_in), block, strict=True)]
    return QuantArray(values, jax.ShapeDtypeStruct((groups, *counts), jnp.float32), block)


@pytest.fixture(scope="module")
def mesh():
    return h200_mesh()


@pytest.mark.parametrize(("name", "format", "tokens"), CASES)
def test_compiles(name, format, tokens, mesh, tmp_path, monkeypatch):
    shape = SHAPES[name]
    groups, d_model, d_ff = shape.groups, shape.d_model, shape.d_ff
    up = weights_shape(format, groups, d_ff, d_model)
    kernels = compile_kernels(
        mesh,
        tmp_path,
        monkeypatch,
        grouped_swiglu,
        jax.ShapeDtypeStruct((shape.rows(tokens), d_model), jnp.bfloat16),
        up,
        up,
        weights_shape(format, groups, d_model, d_ff),
        jax.ShapeDtypeStruct((groups,), jnp.int32),
    )
    print(*kernels, sep="\n")
    assert len(kernels) == 2
    for kernel in kernels:
        assert kernel.spilled == 0
        assert kernel.warnings == []
        assert kernel.shared_memory <= SHARED_MEMORY
