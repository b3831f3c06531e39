"""The second Hopper kernel of paged attention: combines the partial results of units that span
several ranges.

Called by `mosaic_gpu.py` with the results of `mosaic_gpu_kernel.py`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.attention.ranges import piece_of, range_of
from pallas_kernels.mosaic_gpu import load, store

TILE = 64
"""Rows, and columns, that a block of threads combines."""
BLIND = -1e30
"""Finite stand-in for the logarithm of an empty sum."""


def combine(
    out: Float[Array, "units lanes rows v_width"],
    lse: Float32[Array, "units lanes rows"],
    out_pieces: Float[Array, "pieces lanes rows v_width"],
    lse_pieces: Float32[Array, "pieces lanes rows"],
    start: Int32[Array, " units_and_end"],
    *,
    ranges: int,
    interpret: Any,
) -> tuple[Float[Array, "units lanes rows v_width"], Float32[Array, "units lanes rows"]]:
    """Copy a unit that lies in one range; otherwise combine its pieces, weighted by their sums.

    Args:
      out, lse, out_pieces, lse_pieces: see `mosaic_gpu_kernel.attend`.
      start: first step of every unit; at the end the number of all steps.
      ranges: number of ranges that the steps are cut into.
    """
    units, lanes, rows, v_width = out.shape
    kernel = plgpu.kernel(
        functools.partial(_body, ranges=ranges),
        kernel_name="paged_attention_combine",
        out_type=(
            jax.ShapeDtypeStruct(out.shape, out.dtype),
            jax.ShapeDtypeStruct(lse.shape, lse.dtype),
        ),
        grid=(units, lanes * (rows // TILE), v_width // TILE),
        grid_names=("unit", "row_tile", "column_tile"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    whole, log_sum = kernel(out, lse, out_pieces, lse_pieces, start)
    return whole, log_sum


def _body(
    out: Any,
    lse: Any,
    out_pieces: Any,
    lse_pieces: Any,
    start: Any,
    whole: Any,
    log_sum: Any,
    *,
    ranges: int,
) -> None:
    """Combine one tile."""
    unit, column_tile = lax.axis_index("unit"), lax.axis_index("column_tile")
    row = lax.axis_index("row_tile") * TILE
    rows = (row // out.shape[2], pl.ds(lax.rem(row, out.shape[2]), TILE))  # lane, its rows
    tile = (*rows, pl.ds(column_tile * TILE, TILE))
    total = start[start.shape[0] - 1]
    first = range_of(start[unit], total, ranges)
    last = range_of(start[unit + 1] - 1, total, ranges)
    row_layout = plgpu.Layout.WGMMA.reduce(1)

    def write(values: Any, sums: Any) -> None:
        store(whole.at[unit, *tile], values.astype(whole.dtype))
        pl.when(column_tile == 0)(lambda: store(log_sum.at[unit, *rows], sums))

    def load_tile(array: Any, index: Any) -> Any:
        return load(array.at[index, *tile], plgpu.Layout.WGMMA)

    def load_rows(array: Any, index: Any) -> Any:
        return load(array.at[index, *rows], row_layout)

    def add(range_: Any, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        largest, sums, mixed = carry
        piece = piece_of(
            range_, unit, first=range_ == first, units=start.shape[0] - 1, ranges=ranges
        )
        # A piece in which a row saw nothing has -inf; the difference of two of them is NaN.
        piece_lse = jnp.maximum(load_rows(lse_pieces, piece), BLIND)
        new_largest = jnp.maximum(largest, piece_lse)
        shrink, weight = jnp.exp(largest - new_largest), jnp.exp(piece_lse - new_largest)
        values = load_tile(out_pieces, piece).astype(jnp.float32)
        mixed = mixed * lax.broadcast_in_dim(shrink, mixed.shape, [0])
        mixed = mixed + values * lax.broadcast_in_dim(weight, mixed.shape, [0])
        return new_largest, sums * shrink + weight, mixed

    def filled(shape: tuple[int, ...], value: float, layout: Any) -> Any:
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    @pl.when(first == last)
    def _take() -> None:
        write(load_tile(out, unit), load_rows(lse, unit))

    @pl.when(first < last)
    def _add_up() -> None:
        nothing = (
            filled((TILE,), BLIND, row_layout),
            filled((TILE,), 0.0, row_layout),
            filled((TILE, TILE), 0.0, plgpu.Layout.WGMMA),
        )
        largest, sums, mixed = lax.fori_loop(first, last + 1, add, nothing)
        log_of_all = jnp.where(
            largest == BLIND, jnp.full_like(largest, -jnp.inf), largest + jnp.log(sums)
        )
        write(mixed * lax.broadcast_in_dim(1.0 / sums, mixed.shape, [0]), log_of_all)
