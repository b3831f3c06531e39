"""The second Hopper kernel of paged attention: puts units together that lie in several ranges.

Called by `mosaic_gpu.py` with what `mosaic_gpu_kernel.py` left.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

TILE = 64
"""Rows, and columns, of what a block of threads combines."""


def combine(
    out: Float[Array, "units rows v_width"],
    lse: Float32[Array, "units rows"],
    out_pieces: Float32[Array, "pieces rows v_width"],
    lse_pieces: Float32[Array, "pieces rows"],
    start: Int32[Array, " units_and_end"],
    *,
    interpret: Any,
) -> tuple[Float[Array, "units rows v_width"], Float32[Array, "units rows"]]:
    """Take a unit as it is if it lies in one range, else weigh its pieces.

    Args:
      out, lse, out_pieces, lse_pieces: see `mosaic_gpu_kernel.attend`.
      start: of every unit, its first step; at the end the number of all steps.
    """
    units, rows, v_width = out.shape
    kernel = plgpu.kernel(
        functools.partial(_body, ranges=out_pieces.shape[0] // 2),
        kernel_name="paged_attention_combine",
        out_type=(
            jax.ShapeDtypeStruct(out.shape, out.dtype),
            jax.ShapeDtypeStruct(lse.shape, lse.dtype),
        ),
        grid=(units, rows // TILE, v_width // TILE),
        grid_names=("unit", "row_tile", "column_tile"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    whole, log_sum = kernel(out, lse, out_pieces, lse_pieces, start)
    return whole, log_sum


def _body(out, lse, out_pieces, lse_pieces, start, whole, log_sum, *, ranges: int):
    """Combine one tile."""
    unit = lax.axis_index("unit")
    column_tile = lax.axis_index("column_tile")
    rows = pl.ds(lax.axis_index("row_tile") * TILE, TILE)
    columns = pl.ds(column_tile * TILE, TILE)
    total = start[start.shape[0] - 1]

    def range_of(step):
        """Range c begins at step c * total // ranges."""
        return ((step + 1) * ranges - 1) // total

    first, last = range_of(start[unit]), range_of(start[unit + 1] - 1)
    row_layout = plgpu.Layout.WGMMA.reduce(1)

    def write(tile, sums):
        plgpu.store(whole.at[unit, rows, columns], tile.astype(whole.dtype), optimized=False)

        @pl.when(column_tile == 0)
        def _():
            plgpu.store(log_sum.at[unit, rows], sums, optimized=False)

    def load(array, index, *where, layout):
        return plgpu.load(array.at[index, *where], layout=layout, optimized=False)

    @pl.when(first == last)
    def _():
        tile = load(out, unit, rows, columns, layout=plgpu.Layout.WGMMA)
        write(tile, load(lse, unit, rows, layout=row_layout))

    @pl.when(first < last)
    def _():
        def add(piece_range, carry):
            largest, sums, mixed = carry
            piece = 2 * piece_range + jnp.where(piece_range == first, 1, 0)
            tile = load(out_pieces, piece, rows, columns, layout=plgpu.Layout.WGMMA)
            piece_lse = load(lse_pieces, piece, rows, layout=row_layout)
            # A piece in which a row saw nothing has -inf; the difference of two of them is NaN.
            piece_lse = jnp.maximum(piece_lse, BLIND)
            new_largest = jnp.maximum(largest, piece_lse)
            shrink, weight = jnp.exp(largest - new_largest), jnp.exp(piece_lse - new_largest)
            mixed = mixed * lax.broadcast_in_dim(shrink, mixed.shape, [0])
            mixed = mixed + tile * lax.broadcast_in_dim(weight, mixed.shape, [0])
            return new_largest, sums * shrink + weight, mixed

        def filled(shape, value, layout):
            return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

        largest, sums, mixed = lax.fori_loop(
            first,
            last + 1,
            add,
            (
                filled((TILE,), BLIND, row_layout),
                filled((TILE,), 0.0, row_layout),
                filled((TILE, TILE), 0.0, plgpu.Layout.WGMMA),
            ),
        )
        log_of_all = jnp.where(largest == BLIND, -jnp.inf, largest + jnp.log(sums))
        write(mixed / lax.broadcast_in_dim(sums, mixed.shape, [0]), log_of_all)


BLIND = -1e30
"""Stands for the log of a sum of nothing."""
