"""Quantises the TPU kernel's results to 8 bits, with a scale per row and 128 columns.

Called by `mosaic_tpu.py`, in the epilogue of a product. Knows refs and nothing of products.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32

COLUMNS = 128
"""Columns that share a scale."""

SMALLEST_SCALE = 2.0**-100
"""Smallest scale; values that would need a smaller one become zeros with the scale 1."""


def store_quantised(
    result: Float32[Array, "step_rows columns"],
    owned: Bool[Array, "step_rows 1"],
    values: Any,  # [tile_rows, tile_columns], int8 or float8_e4m3fn
    scales: Any,  # [1, tile_rows, units] FP32, a unit of 128 columns each
    part: Any,
    columns: Any,
) -> None:
    """Store the rows that are `owned`, as `quantize_rows` does it, and leave the others.

    Args:
      part: the rows, a slice of the tile.
      columns: likewise; begins at a multiple of 128.
    """
    is_int8 = values.dtype == jnp.int8
    largest = 127.0 if is_int8 else 448.0
    stored = scales[0, part, :]
    unit = lax.broadcasted_iota(jnp.int32, stored.shape, 1) - columns.start // COLUMNS
    pieces = []
    for index, first in enumerate(range(0, result.shape[1], COLUMNS)):
        piece = result[:, first : first + COLUMNS]
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
