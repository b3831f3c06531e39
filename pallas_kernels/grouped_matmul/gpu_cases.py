"""Expert layers of real models to be compiled for Hopper: called by `gpu_resources.py`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gpu_resources import Case
from pallas_kernels.grouped_matmul.api import grouped_swiglu
from pallas_kernels.grouped_matmul.dense import dense_matmul, swiglu_steps_of_fp8
from pallas_kernels.grouped_matmul.packed_sums import Unsummed, sum_and_pack, sum_packed
from pallas_kernels.grouped_matmul.routed import Choices, sort_choices
from pallas_kernels.grouped_matmul.shapes import SHAPES
from pallas_kernels.grouped_matmul.tiles import RowFormat
from pallas_kernels.quantize import QuantArray

FORMATS: dict[str, tuple[Any, tuple[int, int] | None, RowFormat | None]] = {
    "bf16": (jnp.bfloat16, None, None),
    "int8": (jnp.int8, (1, 0), None),
    "int8_float": (jnp.int8, (1, 0), "float"),
    "fp8": (jnp.float8_e4m3fn, (1, 0), None),
    "fp8_block": (jnp.float8_e4m3fn, (128, 128), None),
    "int8_rows": (jnp.int8, (1, 0), "int8"),
    "fp8_rows": (jnp.float8_e4m3fn, (1, 0), "fp8"),
    "fp8_block_rows": (jnp.float8_e4m3fn, (128, 128), "fp8"),
}
"""Dtype and block (of d_out, of d_in; 0: the whole axis) of weights, and `row_format`, by name."""

# Few rows an expert (the smallest tiles), a decode step, and prefill (the largest tiles).
TOKENS = {
    "step3_2a2f": (128, 512, 2048, 3072, 16384),
    "step3_ep16": (2048, 3072),
    "deepseek_v3_ep32": (512, 16384),
    "qwen3_235b_ep8": (512, 16384),
}
CALLS = [
    *((name, format, tokens) for name in TOKENS for format in FORMATS for tokens in TOKENS[name]),
    ("step3", "fp8_block", 2048),
    ("step3_2a2f_shared", "bf16", 2048),
    ("qwen3_235b", "fp8", 512),
]
"""Expert layer, format of its weights, and tokens of the step."""


SHARED_ROWS = (256, 384)
"""Rows of a shared expert in FP8: Step-3's at 2,048 and 3,072 tokens of 8 devices."""

DENSE = {
    "step3 output": (7168, 16384),
    "deepseek_v3 down": (2112, 7168),
}
"""Projections of attention, (d_out, d_in) by name."""


def cases() -> list[Case]:
    """Returns expert layers and shared experts (two kernels each: gate and up, then down), products
    with one weight, and the kernels around experts."""
    dense = [_dense(name, "fp8_block", tokens) for name in DENSE for tokens in (128, 2048)]
    shared = [_shared("step3_half_shared", rows) for rows in SHARED_ROWS]
    return [*(_case(*call) for call in CALLS), *shared, *dense, *around()]


def around() -> list[Case]:
    """Returns the kernels around Step-3's experts in a decode step: sorting choices, adding up and
    packing results in INT8, and adding up packed sums. Cases are named after their kernels."""
    d_model, words, tokens, top_k, groups = 7168, 7296, 2048, 3, 24

    def array(*shape: int, dtype: Any = jnp.int8) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    def pack(base: jax.Array, choices: Choices) -> jax.Array:
        return Unsummed(base, choices).packed(words, (2, 8))

    choices = array(tokens, top_k, dtype=jnp.int32)
    sort = functools.partial(sort_choices, groups=groups)
    of_choices = Choices(
        array(tokens * top_k, d_model, dtype=jnp.bfloat16),
        array(tokens, top_k, dtype=jnp.float32),
        jax.eval_shape(sort, choices),
    )
    base = array(tokens, d_model, dtype=jnp.bfloat16)
    return [
        Case("sort_choices step3", sort, (choices,)),
        Case("pack_sums step3", pack, (base, of_choices)),
        Case("sum_and_pack step3", lambda x: sum_and_pack(x, d_model), (array(8, 256, words),)),
        Case("sum_packed step3", lambda x: sum_packed(x, d_model), (array(2, 128, words),)),
    ]


def _case(name: str, format: str, tokens: int) -> Case:
    shape = SHAPES[name]
    up = _weights(format, shape.groups, shape.d_ff, shape.d_model)
    down = _weights(format, shape.groups, shape.d_model, shape.d_ff)
    rows = jax.ShapeDtypeStruct((shape.rows(tokens), shape.d_model), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((shape.groups,), jnp.int32)

    function = functools.partial(grouped_swiglu, row_format=FORMATS[format][2])
    return Case(f"{name} {format} {tokens}", function, (rows, up, up, down, sizes))


def _shared(name: str, tokens: int) -> Case:
    """Returns a shared expert as a single group, whose rows are received in FP8."""
    shape = SHAPES[name]
    up = _weights("fp8_block_rows", 1, shape.d_ff, shape.d_model)
    down = _weights("fp8_block_rows", 1, shape.d_model, shape.d_ff)
    values = jax.ShapeDtypeStruct((tokens, shape.d_model), jnp.float8_e4m3fn)
    scales = jax.ShapeDtypeStruct((tokens, 1), jnp.float32)

    def function(values: jax.Array, *weights: Any) -> jax.Array:
        *matrices, scales = weights
        narrow = QuantArray(values, scales, (1, 0))
        one = [jax.tree.map(lambda array: array[0], stack) for stack in matrices]
        steps = swiglu_steps_of_fp8(jnp.zeros(values.shape, jnp.bfloat16), narrow, *one)
        assert steps is not None
        first, second = steps
        return second(first(narrow))

    return Case(f"{name} fp8_block_rows {tokens}", function, (values, up, up, down, scales))


def _dense(name: str, format: str, tokens: int) -> Case:
    d_out, d_in = DENSE[name]
    weights = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape[1:], array.dtype),
        _weights(format, 1, d_out, d_in),
    )
    rows = jax.ShapeDtypeStruct((tokens, d_in), jnp.bfloat16)
    return Case(f"{name} {format} {tokens}", dense_matmul, (rows, weights))


def _weights(format: str, groups: int, d_out: int, d_in: int) -> jax.ShapeDtypeStruct | QuantArray:
    dtype, block, _ = FORMATS[format]
    values = jax.ShapeDtypeStruct((groups, d_out, d_in), dtype)
    if block is None:
        return values
    blocks = [-(-axis // (size or axis)) for axis, size in zip((d_out, d_in), block, strict=True)]
    return QuantArray(values, jax.ShapeDtypeStruct((groups, *blocks), jnp.float32), block)
