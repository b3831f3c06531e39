"""One product of the TPU kernel, with the scales of both factors, if they have scales, and results
quantised to 8 bits, with a scale per row, or per row and 128 columns.

Called by `mosaic_tpu.py`. Knows refs and nothing of visits.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float32

from pallas_kernels.grouped_matmul.mosaic_tpu_plan import LANES, WORD
from pallas_kernels.quantize import from_bits

SMALLEST_SCALE = 2.0**-100
"""Smallest scale; values that would need a smaller one become zeros with the scale 1."""

ROWS = 32
"""Rows that are quantised at a time where a scale is a whole row's: a register's, of 8 bits."""


class Blocks(NamedTuple):
    """Layout of the scales.

    Attributes:
      by_column, block_in: layout of the weights' scales, as `arrange_scales` returns it.
      product_in: values of d_in that are summed up before scales are applied.
    """

    by_column: bool
    block_in: int
    product_in: int


def product(
    blocks: Blocks,
    rows: Any,
    row_dtype: DTypeLike,
    weight: Any,
    scales: Any = None,
    zeros: Any = None,
    *,
    row_scales: list[Array],
) -> Array:
    """Multiplies rows [step_rows, d_in] by one piece of weights [step_columns, d_in].

    Rows of 8 bits may be uint8, the bits of their dtype. Scales of MXFP4 weights are exponents, of
    which `WORD` share a word. Zero points are multiplied by the sum of a
    row's block, instead of being subtracted from each weight. Returns [step_rows, step_columns].
    """
    if scales is None:
        return _dot(rows[...], weight[...])

    def of_rows(columns: Any) -> Array:
        found: Array = rows[:, columns]
        same = found.dtype == row_dtype
        return found if same else lax.bitcast_convert_type(found, row_dtype)

    d_in, columns = rows.shape[1], weight.shape[0]
    units, mxfp4 = scales.shape[0], weight.dtype == jnp.float4_e2m1fn

    def spread(ref: Any, number: Any, part: int = 0) -> Array:
        """Returns the columns' scales (or zero points) of a block, [1, step_columns]: of words,
        `part` of word `number`."""
        place = (number, slice(None)) if blocks.by_column else (0, slice(number, number + 1))
        of_units = [
            jnp.broadcast_to(ref[unit, *place].reshape(1, -1), (1, columns // units))
            for unit in range(units)
        ]
        found = jnp.concatenate(of_units, axis=1)
        return _half_power(found, part) if mxfp4 else found

    def scaled(x: Array, w: Array, index: Any, number: Any, part: int = 0) -> Array:
        """Returns scaled sums over the rows' block `index`, with the weights' scale `number`."""
        scale = spread(scales, number, part)
        for scales_of_row in row_scales:
            scale = _column(scales_of_row, index) * scale
        sums = _dot(x, w).astype(jnp.float32)
        if zeros is not None:
            of_row = jnp.sum(x.astype(jnp.float32), axis=1, keepdims=True)
            sums -= of_row * spread(zeros, number)
        return sums * scale

    whole = LANES % blocks.product_in == 0 and d_in % blocks.product_in == 0
    if blocks.by_column and blocks.product_in < LANES and whole:

        def add(index: Any, total: Array, size: int = LANES) -> Array:
            here = pl.ds(pl.multiple_of(index * LANES, LANES), size)
            x, w = of_rows(here), _converted(weight[:, here], row_dtype)
            for part in range(size // blocks.product_in):
                block = slice(part * blocks.product_in, (part + 1) * blocks.product_in)
                place = index * (LANES // blocks.product_in) + part
                number = (index, part) if mxfp4 else (place,)
                total += scaled(x[:, block], w[:, block], index, *number)
            return total

        # A loop: unrolled, the compiler takes minutes for groups of 32.
        nothing = jnp.zeros((rows.shape[0], columns), jnp.float32)
        total = lax.fori_loop(0, d_in // LANES, add, nothing)
        return add(d_in // LANES, total, d_in % LANES) if d_in % LANES else total
    sums = []
    for first in range(0, d_in, blocks.product_in):
        block = slice(first, min(first + blocks.product_in, d_in))
        index, place = first // LANES, first // blocks.block_in
        number = divmod(place, WORD) if mxfp4 else (place,)
        sums.append(scaled(of_rows(block), from_bits(weight[:, block]), index, *number))
    return sum(sums[1:], start=sums[0])


def _half_power(words: Array, part: int) -> Array:
    """Returns half of the scales in byte `part` of words, FP32; 2^-127 counts as 0."""
    exponents = lax.shift_right_logical(words, jnp.int32(8 * part)) & 255
    return 0.5 * lax.bitcast_convert_type(exponents << 23, jnp.float32)


def _doubled(weights: Array, dtype: DTypeLike) -> Array:
    """Returns twice the E2M1 numbers: 0, 1, 2, 3, 4, 6, 8, 12, then their negatives. Uses their
    codes, since only v7x converts them, as floats, since a register holds two in BF16."""
    signed = lax.bitcast_convert_type(weights, jnp.int4).astype(dtype)
    code = jnp.where(signed < 0, signed + 8, signed)
    size = jnp.maximum(jnp.maximum(code, 2 * code - 4), 4 * code - 16)
    return jnp.where(signed < 0, -size, size)


def _column(scales_of_row: Array, index: Any) -> Array:
    """Returns all rows' scales of one block of `LANES` columns, [step_rows, 1]. A row may have only
    one scale for all of d_in."""
    last = scales_of_row.shape[1] - 1
    if not last:
        return scales_of_row
    if isinstance(index, int):
        return scales_of_row[:, min(index, last) : min(index, last) + 1]
    here = lax.broadcasted_iota(jnp.int32, scales_of_row.shape, 1) == index
    return jnp.sum(jnp.where(here, scales_of_row, 0.0), axis=1, keepdims=True)


def _dot(rows: Array, weights: Array) -> Array:
    """Returns [rows, d_in] · [columns, d_in]ᵀ, summed in FP32, or int32 for 8-bit integers."""
    return lax.dot_general(
        rows,
        _converted(weights, rows.dtype),
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None,
        preferred_element_type=jnp.int32 if rows.dtype == jnp.int8 else jnp.float32,
    )


def _converted(weights: Array, dtype: DTypeLike) -> Array:
    """Returns weights in a dtype that rows of this dtype can be multiplied with."""
    if weights.dtype == jnp.float4_e2m1fn:
        return _doubled(weights, dtype)
    # No MXU multiplies integers by floats; FP8 by BF16 is for the compiler to convert.
    integers = weights.dtype in (jnp.int8, jnp.int4) and weights.dtype != dtype
    return weights.astype(dtype) if integers or dtype == jnp.float32 else weights


def store_quantised(
    result: Float32[Array, "step_rows columns"],
    owned: Bool[Array, "step_rows 1"],
    values: Any,  # [tile_rows, tile_columns], int8 or float8_e4m3fn
    scales: Any,  # [1, tile_rows, units] FP32
    part: Any,
    columns: Any,
    unit_columns: int,
) -> None:
    """Stores the rows that are `owned`, quantised like `quantize_rows`, and leaves the others.

    Args:
      part: the rows, a slice of the tile.
      columns: likewise; begins at a multiple of `unit_columns`.
      unit_columns: number of columns that share a scale.
    """
    is_int8 = values.dtype == jnp.int8
    largest = 127.0 if is_int8 else 448.0
    stored = scales[0, part, :]
    unit = lax.broadcasted_iota(jnp.int32, stored.shape, 1) - columns.start // unit_columns
    pieces = []
    for index, first in enumerate(range(0, result.shape[1], unit_columns)):
        piece = result[:, first : first + unit_columns]
        scale = jnp.max(jnp.abs(piece), axis=1, keepdims=True) * (1.0 / largest)
        scale = jnp.where(scale < SMALLEST_SCALE, 1.0, scale)
        pieces.append(jnp.clip(piece * (1.0 / scale), -largest, largest))
        stored = jnp.where(owned & (unit == index), scale, stored)
    scales[0, part, :] = stored
    # Selected in FP32, of which 8 bits are a part: what there is of other groups stays exact.
    before = values[part, columns].astype(jnp.float32)
    wide = jnp.where(owned, jnp.concatenate(pieces, axis=1), before)
    if is_int8:
        values[part, columns] = jnp.round(wide).astype(jnp.int32).astype(jnp.int8)
    else:
        values[part, columns] = wide.astype(values.dtype)


def store_whole_rows(
    results: Any,  # [step_rows or more, d]
    owned: tuple[Any, Any],
    values: Any,  # [tile_rows, d]
    scales: Any,  # [1, tile_rows, 1] FP32
    row: Any,
    step_rows: int,
) -> None:
    """Stores results that have all their columns, with a scale a row.

    Args:
      owned: the first owned row of the tile, and one past the last.
      row: row of the first result; a multiple of `ROWS`, as `step_rows` is on TPUs.
    """
    (first, end), d, rows = owned, results.shape[1], math.gcd(ROWS, step_rows)

    def store(index: Any, carry: None) -> None:
        begin = pl.multiple_of(index * rows, rows)
        part = pl.ds(pl.multiple_of(row + begin, rows), rows)
        number = row + begin + lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
        result = results[pl.ds(begin, rows), :].astype(jnp.float32)
        here = (number >= first) & (number < end)
        store_quantised(result, here, values, scales, part, pl.ds(0, d), d)

    begin = lax.div(jnp.maximum(first - row, 0), rows)
    lax.fori_loop(begin, pl.cdiv(jnp.minimum(end - row, step_rows), rows), store, None)
