"""Converts formats of rows and weights to the operands of the TPU kernel.

Called by `mosaic_tpu.py`. Knows nothing of tiles and visits.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

from pallas_kernels.grouped_matmul.tiles import RowFormat
from pallas_kernels.quantize import FOUR_BITS, QuantArray, quantize_weight
from pallas_kernels.quantize.product import ROW_BLOCK
from pallas_kernels.target import Target

WeightArray = Array | QuantArray


def factor_of(
    rows: Array, row_format: RowFormat | None, target: Target, narrow: QuantArray | None = None
) -> Array | QuantArray:
    """Returns the rows as the kernel multiplies them: in 8 bits, with a scale for every `ROW_BLOCK`
    columns, if `row_format` asks for that.

    Args:
      narrow: the rows in the format of the weights, with a scale each; used if the device
        multiplies that format and `row_format` is None.

    Raises:
      NotImplementedError: the device does not multiply such numbers.
    """
    has_fp8 = "7" in target.device_kind
    if row_format is None and narrow is not None and (has_fp8 or narrow.dtype == jnp.int8):
        return narrow
    if row_format is None or row_format == "float":
        return rows
    if row_format == "fp8" and not has_fp8:
        raise NotImplementedError(
            f"{target.device_kind} multiplies no float8_e4m3fn by itself: leave row_format None, "
            "and FP8 weights are multiplied by the rows as they are; or use INT8 weights"
        )
    return quantize_weight(rows, row_format, (1, ROW_BLOCK))


def of_groups(weights: tuple[WeightArray, ...]) -> list[Any]:
    """Returns the scales and zero points of weights in 4 bits, a number for every group."""
    return [
        array
        for w in weights
        if isinstance(w, QuantArray)
        for array in (w.scales, w.zeros)
        if array is not None
    ]


def with_scales_of(weights: WeightArray, first: Array, groups: int) -> WeightArray:
    """Returns weights whose values are those of all groups, as they lie in memory, and whose scales
    and zero points are those of `groups` groups from `first` on: these are few, and are rearranged
    for each call."""
    if not isinstance(weights, QuantArray):
        return weights

    def cut(array: Array) -> Array:
        return lax.dynamic_slice_in_dim(array, first, groups)

    scales, zeros = jax.tree.map(cut, (weights.scales, weights.zeros))
    return dataclasses.replace(weights, scales=scales, zeros=zeros)


def same_format(a: WeightArray, b: WeightArray) -> bool:
    """Whether one pass can multiply by both weights."""
    if isinstance(a, QuantArray) and isinstance(b, QuantArray):
        same = a.dtype == b.dtype and a.block == b.block
        return same and (a.zeros is None) == (b.zeros is None)
    return not isinstance(a, QuantArray) and not isinstance(b, QuantArray)


def format_name(dtype: DTypeLike, row_dtype: DTypeLike, rows: bool, blocks: bool) -> str:
    """Returns the name that `tiles.py` has for the format of weights, and of rows in 8-bit blocks.

    Weights in 4 bits, and INT8 weights that are converted, are cut like FP8 ones.
    """
    converted = dtype in FOUR_BITS or (dtype == jnp.int8 and row_dtype != jnp.int8)
    fp8 = converted or dtype in (jnp.float8_e4m3fn, jnp.uint8)
    name = "fp8" if fp8 else jnp.dtype(dtype).name
    return name + (" rows" if rows else "") + (" blocks" if blocks else "")
