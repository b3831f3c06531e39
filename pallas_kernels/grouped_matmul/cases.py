"""Expert layers of real models, to be compiled ahead of time: called by `pallas_kernels/aot.py`."""

import jax
import jax.numpy as jnp

from pallas_kernels.aot import GENERATIONS, Case, Loop
from pallas_kernels.grouped_matmul.api import grouped_swiglu
from pallas_kernels.grouped_matmul.shapes import SHAPES
from pallas_kernels.grouped_matmul.tiles import tpu_tiles
from pallas_kernels.quantize import QuantArray, scales_shape

DECODE, PREFILL = 512, 8192
"""Tokens of all devices that share the layer."""

FORMATS = {
    "bf16": (jnp.bfloat16, None),
    "fp8": (jnp.uint8, (1, 0)),
    "fp8_block": (jnp.uint8, (128, 128)),
    "int8": (jnp.int8, (1, 0)),
}
"""Dtype and block of the weights, by name; FP8 is given as bits. A generation that cannot multiply
a format (FP8 before v7x) converts the weights in the kernel."""

NAMES = ("step3_2a2f", "deepseek_v3_ep32", "qwen3_235b_ep8")


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
    up = _weight((shape.groups, shape.d_ff, shape.d_model), format)
    down = _weight((shape.groups, shape.d_model, shape.d_ff), format)
    rows = jax.ShapeDtypeStruct((shape.rows(tokens), shape.d_model), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((shape.groups,), jnp.int32)
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
        arguments=(rows, up, up, down, sizes),
        loop=loop,
    )


def _weight(shape: tuple[int, int, int], format: str) -> jax.ShapeDtypeStruct | QuantArray:
    dtype, block = FORMATS[format]
    values = jax.ShapeDtypeStruct(shape, dtype)
    if block is None:
        return values
    return QuantArray(values, jax.ShapeDtypeStruct(scales_shape(shape, block), jnp.float32), block)
