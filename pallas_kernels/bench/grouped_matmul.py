"""Expert layers at real sizes: inputs and counts."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.bench.attention import values
from pallas_kernels.grouped_matmul.api import grouped_swiglu
from pallas_kernels.grouped_matmul.shapes import ExpertShape
from pallas_kernels.grouped_matmul.tiles import RowFormat
from pallas_kernels.quantize import QuantArray, scales_shape

ROW_FORMATS: dict[str, RowFormat] = {
    "fp8_block_rows": "fp8",
    "int8_rows": "int8",
    "int8_float": "float",
}
"""`row_format` of the formats that need one: rows in 8-bit blocks, or rows as they are."""
FORMATS = ("bf16", "int8", "fp8", "fp8_block", *ROW_FORMATS)


class Step(NamedTuple):
    """The SwiGLU of one device's experts, for the rows that `tokens` tokens bring, evenly."""

    shape: ExpertShape
    format: str
    tokens: int

    @property
    def rows(self) -> int:
        """Rows of all groups."""
        return self.shape.rows(self.tokens)

    def bytes(self) -> int:
        """Bytes read and written: weights and scales of groups with rows, rows in and out."""
        shape = self.shape
        sizes = ((shape.d_ff, shape.d_model),) * 2 + ((shape.d_model, shape.d_ff),)
        weights = 0
        for size in sizes:
            weights += size[0] * size[1] * (2 if self.format == "bf16" else 1)
            if self.format != "bf16":
                scales = scales_shape(size, block(self.format))
                weights += 4 * scales[0] * scales[1]
        return min(self.rows, shape.groups) * weights + 2 * 2 * self.rows * shape.d_model

    def flops(self) -> int:
        """FLOPs of the three products."""
        return 6 * self.rows * self.shape.d_model * self.shape.d_ff


def block(format: str) -> tuple[int, int]:
    """Returns rows and columns of the blocks that share a scale; 0: all columns."""
    return (128, 128) if format.startswith("fp8_block") else (1, 0)


def weight(key: Any, shape: tuple[int, int, int], format: str) -> Any:
    """Returns random weights whose products stay near 1."""
    found = values(key, shape, format)
    size = shape[2] ** -0.5
    if format == "bf16":
        return found * jnp.asarray(size, found.dtype)
    cut = block(format)
    scale = size / 64 if found.dtype == jnp.int8 else size
    return QuantArray(found, jnp.full(scales_shape(shape, cut), scale, jnp.float32), cut)


def inputs(step: Step) -> tuple[Any, ...]:
    """Returns the arguments of `grouped_swiglu`."""
    shape = step.shape
    keys = jax.random.split(jax.random.key(0), 4)
    up = (shape.groups, shape.d_ff, shape.d_model)
    down = (shape.groups, shape.d_model, shape.d_ff)
    sizes = [(step.rows + index) // shape.groups for index in range(shape.groups)]
    return (
        jax.random.normal(keys[0], (step.rows, shape.d_model), jnp.bfloat16),
        weight(keys[1], up, step.format),
        weight(keys[2], up, step.format),
        weight(keys[3], down, step.format),
        jnp.asarray(sizes, jnp.int32),
    )


def call(step: Step) -> Callable[..., Any]:
    """Returns the measured function; it takes `inputs`."""
    return functools.partial(grouped_swiglu, row_format=ROW_FORMATS.get(step.format))


def checked(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the arguments for the rows that are checked: all rows."""
    return arguments
