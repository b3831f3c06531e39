"""Quantises the TPU kernel's results to 8 bits, with a scale per row, or per row and 128 columns.

Called by `mosaic_tpu.py`, in the epilogue of a product. Knows refs and nothing of products.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float32

SMALLEST_SCALE = 2.0**-100
"""Smallest scale; values that would need a smaller one become zeros with the scale 1."""


ROWS = 32
"""Rows that are quantised at a time where a scale is a whole row's: a register's, of 8 bits."""


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
