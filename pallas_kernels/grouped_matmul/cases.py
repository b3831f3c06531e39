"""Decode steps of real models, to be compiled ahead of time: called by `pallas_kernels/aot.py`."""

import jax
import jax.numpy as jnp

from pallas_kernels.aot import GENERATIONS, Case, Loop
from pallas_kernels.grouped_matmul.api import grouped_swiglu
from pallas_kernels.grouped_matmul.shapes import SHAPES
from pallas_kernels.grouped_matmul.tiles import TPU
from pallas_kernels.quantize import QuantArray, scales_shape

TOKENS = 512

FORMATS = {
    "bf16": (jnp.bfloat16, None),
    "fp8": (jnp.uint8, (1, 0)),
    "fp8_block": (jnp.uint8, (128, 128)),
    "int8": (jnp.int8, (1, 0)),
}
"""Of weights: dtype and block; FP8 as its bits."""

NAMES = ("step3_2a2f", "deepseek_v3_ep32", "qwen3_235b_ep8")


def cases(generation: str) -> list[Case]:
    """The sharded layers in BF16 and in the generation's formats of 8 bits."""
    formats = ("bf16", "fp8", "fp8_block") if generation == "v7x" else ("bf16", "int8", "fp8")
    return [_decode(name, format, generation) for name in NAMES for format in formats]


def _decode(name: str, format: str, generation: str) -> Case:
    """One decode step of `TOKENS` tokens; the loop is that of gate and up, its smallest product."""
    shape = SHAPES[name]
    up = _weight((shape.groups, shape.d_ff, shape.d_model), format)
    down = _weight((shape.groups, shape.d_model, shape.d_ff), format)
    rows = jax.ShapeDtypeStruct((shape.rows(TOKENS), shape.d_model), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((shape.groups,), jnp.int32)
    return Case(
        name=f"{name} {format}",
        function=grouped_swiglu,
        arguments=(rows, up, up, down, sizes),
        loop=Loop(
            kernel="grouped_swiglu",
            unit="column of gate and up",
            units=TPU[GENERATIONS[generation].device_kind].step_columns,
            copies=0,
            bytes_per_unit=2 * shape.d_model * jnp.dtype(FORMATS[format][0]).itemsize,
        ),
    )


def _weight(shape: tuple[int, int, int], format: str) -> jax.ShapeDtypeStruct | QuantArray:
    dtype, block = FORMATS[format]
    values = jax.ShapeDtypeStruct(shape, dtype)
    if block is None:
        return values
    return QuantArray(values, jax.ShapeDtypeStruct(scales_shape(shape, block), jnp.float32), block)
