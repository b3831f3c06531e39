"""One product of the TPU kernel, with the scales of both factors, where there are some.

Called by `mosaic_tpu.py`. Knows refs and nothing of visits.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.quantize import from_bits


class Blocks(NamedTuple):
    """How scales lie.

    Attributes:
      by_column, block_in: of the weights' scales, as `arrange_scales` gives them.
      product_in: how many of d_in are summed up before scales are applied.
    """

    by_column: bool
    block_in: int
    product_in: int


def product(
    blocks: Blocks, rows: Any, weight: Any, scales: Any = None, *, row_scales: list[Array]
) -> Array:
    """Rows [step_rows, d_in] times one piece [step_columns, d_in]: [step_rows, step_columns]."""
    if scales is None:
        return _dot(rows[...], weight[...])
    d_in, columns = rows.shape[1], weight.shape[0]
    units = scales.shape[0]
    sums = []
    for index, first in enumerate(range(0, d_in, blocks.product_in)):
        block = slice(first, min(first + blocks.product_in, d_in))
        number = first // blocks.block_in
        place = (number, slice(None)) if blocks.by_column else (0, slice(number, number + 1))
        of_units = [
            jnp.broadcast_to(scales[unit, *place].reshape(1, -1), (1, columns // units))
            for unit in range(units)
        ]
        scale = jnp.concatenate(of_units, axis=1)
        for scales_of_row in row_scales:
            column = min(index, scales_of_row.shape[1] - 1)  # a scale for all, or one for each
            scale = scales_of_row[:, column : column + 1] * scale
        product = _dot(rows[:, block], from_bits(weight[:, block])).astype(jnp.float32)
        sums.append(product * scale)
    return sum(sums[1:], start=sums[0])


def _dot(rows: Array, weights: Array) -> Array:
    """[rows, d_in] · [columns, d_in]ᵀ, summed in FP32, or int32 for 8-bit integers."""
    full = rows.dtype == jnp.float32
    # No MXU multiplies integers by floats; FP8 by BF16 is for the compiler to convert.
    converts = full or (weights.dtype == jnp.int8 and rows.dtype != jnp.int8)
    return lax.dot_general(
        rows,
        weights.astype(rows.dtype) if converts else weights,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if full else None,
        preferred_element_type=jnp.int32 if rows.dtype == jnp.int8 else jnp.float32,
    )
