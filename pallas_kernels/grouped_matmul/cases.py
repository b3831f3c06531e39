"""Expert layers of real models, to be compiled ahead of time.

Called by `pallas_kernels/aot.py` for TPUs, and by `pallas_kernels/gpu_resources.py` for GPUs.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.aot import GENERATIONS, Case, Loop
from pallas_kernels.grouped_matmul.api import grouped_swiglu
from pallas_kernels.grouped_matmul.dense import dense_matmul, swiglu_steps_of_fp8
from pallas_kernels.grouped_matmul.packed_sums import Unsummed, sum_and_pack, sum_packed
from pallas_kernels.grouped_matmul.routed import Choices, sort_choices
from pallas_kernels.grouped_matmul.shapes import SHAPES
from pallas_kernels.grouped_matmul.tiles import RowFormat, tpu_tiles
from pallas_kernels.quantize import QuantArray, scales_shape

DECODE, PREFILL = 512, 8192
"""Tokens of all devices that share the layer."""

FORMATS: dict[str, tuple[Any, tuple[int, int] | None]] = {
    "bf16": (jnp.bfloat16, None),
    "fp8": (jnp.uint8, (1, 0)),
    "fp8_block": (jnp.uint8, (128, 128)),
    "int8": (jnp.int8, (1, 0)),
}
"""Dtype and block of the weights, by name; FP8 is given as bits. A generation that cannot multiply
a format (FP8 before v7x) converts the weights in the kernel."""

NAMES = ("step3_2a2f", "deepseek_v3_ep32", "qwen3_235b_ep8")


GPU_FORMATS: dict[str, tuple[Any, tuple[int, int] | None, RowFormat | None]] = {
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
GPU_TOKENS = {
    "step3_2a2f": (128, 512, 2048, 3072, 16384),
    "step3_ep16": (2048, 3072),
    "deepseek_v3_ep32": (512, 16384),
    "qwen3_235b_ep8": (512, 16384),
}
GPU_CALLS = [
    *(
        (name, format, tokens)
        for name in GPU_TOKENS
        for format in GPU_FORMATS
        for tokens in GPU_TOKENS[name]
    ),
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


def cases(generation: str) -> list[Case]:
    """Returns the sharded layers, at the sizes of decode and of prefill."""
    return [
        _layer(name, format, generation, tokens)
        for name in NAMES
        for format in FORMATS
        for tokens in (DECODE, PREFILL)
    ]


def _layer(name: str, format: str, generation: str, tokens: int) -> Case:
    """Returns one step of a layer. At decode size its loop is that of gate and up, per column."""
    shape = SHAPES[name]
    loop = None
    if tokens == DECODE:
        device_kind, widths = GENERATIONS[generation].device_kind, (shape.d_model, shape.d_ff)
        kind = {"bf16": "bfloat16", "fp8_block": "fp8 blocks"}.get(format, format)
        loop = Loop(
            kernel="grouped_swiglu",
            unit="column of gate and up",
            units=tpu_tiles(device_kind, 2, widths, kind)[0].step_columns,
            copies=0,
            bytes_per_unit=2 * shape.d_model * jnp.dtype(FORMATS[format][0]).itemsize,
        )
    return Case(
        name=f"{name} {format}" + ("" if tokens == DECODE else " prefill"),
        function=grouped_swiglu,
        arguments=_arguments(name, *FORMATS[format], tokens),
        loop=loop,
    )


def gpu_cases() -> list[Case]:
    """Returns expert layers and shared experts (two kernels each: gate and up, then down), products
    with one weight, and the kernels around experts."""
    dense = [_dense(name, "fp8_block", tokens) for name in DENSE for tokens in (128, 2048)]
    shared = [_shared("step3_half_shared", rows) for rows in SHARED_ROWS]
    return [*(_gpu_layer(*call) for call in GPU_CALLS), *shared, *dense, *around()]


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


def _gpu_layer(name: str, format: str, tokens: int) -> Case:
    dtype, block, row_format = GPU_FORMATS[format]
    function = functools.partial(grouped_swiglu, row_format=row_format)
    return Case(f"{name} {format} {tokens}", function, _arguments(name, dtype, block, tokens))


def _shared(name: str, tokens: int) -> Case:
    """Returns a shared expert as a single group, whose rows are received in FP8."""
    shape = SHAPES[name]
    block = GPU_FORMATS["fp8_block_rows"][1]
    up = _weight((1, shape.d_ff, shape.d_model), jnp.float8_e4m3fn, block)
    down = _weight((1, shape.d_model, shape.d_ff), jnp.float8_e4m3fn, block)
    values = jax.ShapeDtypeStruct((tokens, shape.d_model), jnp.float8_e4m3fn)
    scales = jax.ShapeDtypeStruct((tokens, 1), jnp.float32)

    def function(values: jax.Array, *weights: Any) -> jax.Array:
        *matrices, scales = weights
        narrow = QuantArray(values, scales, (1, 0))
        gate, up, down = (jax.tree.map(lambda array: array[0], stack) for stack in matrices)
        steps = swiglu_steps_of_fp8(jnp.zeros(values.shape, jnp.bfloat16), narrow, (gate, up, down))
        assert steps is not None
        first, second = steps
        return second(first(narrow))

    return Case(f"{name} fp8_block_rows {tokens}", function, (values, up, up, down, scales))


def _dense(name: str, format: str, tokens: int) -> Case:
    d_out, d_in = DENSE[name]
    weights = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape[1:], array.dtype),
        _weight((1, d_out, d_in), *GPU_FORMATS[format][:2]),
    )
    rows = jax.ShapeDtypeStruct((tokens, d_in), jnp.bfloat16)
    return Case(f"{name} {format} {tokens}", dense_matmul, (rows, weights))


def _arguments(
    name: str, dtype: Any, block: tuple[int, int] | None, tokens: int
) -> tuple[Any, ...]:
    """Returns the arguments of `grouped_swiglu` for one step of a layer."""
    shape = SHAPES[name]
    up = _weight((shape.groups, shape.d_ff, shape.d_model), dtype, block)
    down = _weight((shape.groups, shape.d_model, shape.d_ff), dtype, block)
    rows = jax.ShapeDtypeStruct((shape.rows(tokens), shape.d_model), jnp.bfloat16)
    return rows, up, up, down, jax.ShapeDtypeStruct((shape.groups,), jnp.int32)


def _weight(
    shape: tuple[int, int, int], dtype: Any, block: tuple[int, int] | None
) -> jax.ShapeDtypeStruct | QuantArray:
    values = jax.ShapeDtypeStruct(shape, dtype)
    if block is None:
        return values
    return QuantArray(values, jax.ShapeDtypeStruct(scales_shape(shape, block), jnp.float32), block)
