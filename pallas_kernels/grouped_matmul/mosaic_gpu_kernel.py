"""The Hopper kernel of grouped products: a persistent, warp-specialised TMA + wgmma loop.

Called by `mosaic_gpu.py`, which prepares the operands and picks the tiles. Knows nothing of
`QuantArray`: it takes 8- or 16-bit weights, 8- or 16-bit rows, and up to four kinds of scales.

Weights are the left operand of wgmma (its M, 64 rows of d_out for every warpgroup) and rows the
right one (its N, a multiple of 8). So a group of few rows wastes no tensor core time, 8-bit weights
can be converted in registers, which only the left operand may come from, and one kernel serves
decode and prefill. What it computes is the transposed product, which it stores transposed.

The last warpgroup only loads: weight and row tiles go through a ring of `stages` buffers, and it
runs ahead of the others across the borders of output tiles, so that memory is never idle. The
`consumers` other warpgroups (`mosaic_gpu_weights_first.py`) own part of the output columns each.

Where groups have many rows, two blocks form a cluster (`tiles.shared`): they work on neighbouring
tiles, either on rows of one group and the same weights, or on columns for the same rows. Of what
they share each loads one half, into the shared memory of both (multicast), so that it leaves the L2
cache once. A stage is free once the consumers of both blocks are done with it.

Rows in 8 bits with a scale for every block are treated otherwise (`mosaic_gpu_scaled.py`), by all
warpgroups, none of which only loads: groups of some rows are summed up in parts, and in groups of
many the rows are the left operand.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.grouped_matmul.mosaic_gpu_scaled import compute_in_parts, compute_rows_first
from pallas_kernels.grouped_matmul.mosaic_gpu_types import (
    CLUSTER,
    CLUSTER_AXIS,
    SPARE_SCALES,
    Context,
    Epilogue,
    Narrowing,
    Operands,
    Ref,
    Scratch,
    Tiles,
    quantises,
)
from pallas_kernels.grouped_matmul.mosaic_gpu_walk import load_and_compute
from pallas_kernels.grouped_matmul.mosaic_gpu_weights_first import compute, load
from pallas_kernels.grouped_matmul.tile_list import BLOCK_ROWS, TileList

SWIZZLE = 128  # bytes: what one row of an operand's block in SMEM spans, at most


def grouped_product(
    operands: Operands,
    tile_list: TileList,
    epilogue: Epilogue,
    out_dtype: DTypeLike,
    tiles: Tiles,
    processors: int,
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """Returns `epilogue(rows · weights[0]ᵀ, ...)` for the rows of every group. Padding rows in the
    list of tiles become zeros; others are not written.

    Args:
      operands: see `Operands`.
      tile_list: tiles of `tiles.listed_rows` rows.
      epilogue: elementwise function from the FP32 products with each weight, transposed or not, to
        the results; maps zeros to zeros.
      out_dtype: dtype of the result; in 8 bits it is quantised, a scale for each row and tile.
      tiles: sizes.
      processors: CTAs to start, one for each multiprocessor; an even number.
      interpret: parameters of Pallas' GPU interpret mode, or None to compile.

    Returns:
      [rows, d_out], and if it is quantised its scales, FP32 [d_out / tiles.out, rows +
      SPARE_SCALES]. With `tiles.splits`, for a single group of all rows: the sums of every part of
      d_in, FP32 [splits, d_out, rows], both rounded up to whole tiles.
    """
    groups, d_out, d_in = operands.weights[0].shape
    rows = operands.rows.shape[0]
    out_type = [jax.ShapeDtypeStruct((rows, d_out), out_dtype)]
    if quantises(out_dtype):
        scales_shape = (d_out // tiles.out, rows + SPARE_SCALES)
        out_type.append(jax.ShapeDtypeStruct(scales_shape, jnp.float32))

    if tiles.splits > 1:
        whole = (
            pl.cdiv(size, tile) * tile for size, tile in ((d_out, tiles.out), (rows, tiles.rows))
        )
        out_type = [jax.ShapeDtypeStruct((tiles.splits, *whole), jnp.float32)]

    def grouped_kernel(operands: Operands, tile_list: TileList, output: Ref, *refs: Any) -> None:
        *output_scales, scratch = refs
        context = Context(
            tiles,
            groups,
            pl.cdiv(d_out, tiles.listed_out) * tiles.splits,
            pl.cdiv(d_in, tiles.inner) // tiles.splits,
            operands,
            tile_list,
            output,
            output_scales[0] if output_scales else None,
            scratch,
        )
        warpgroup = jax.lax.axis_index("warpgroup")
        if not tiles.loader:
            compute_tile = compute_rows_first if tiles.rows_first else compute_in_parts
            load_and_compute(context, epilogue, warpgroup, compute_tile)
            plgpu.wait_smem_to_gmem(0)
            return

        @pl.when(warpgroup == tiles.consumers)
        def _load() -> None:
            load(context)

        @pl.when(warpgroup < tiles.consumers)
        def _compute() -> None:
            compute(context, epilogue, warpgroup)
            plgpu.wait_smem_to_gmem(0)

    blocks = CLUSTER if tiles.shared else 1
    kernel = plgpu.kernel(
        grouped_kernel,
        out_type=out_type,
        scratch_types=[_scratch_types(operands, out_dtype, tiles, interpret is not None)],  # type: ignore[list-item]
        grid=(processors // blocks,),
        grid_names=("processor",),
        cluster=(blocks,) if tiles.shared else (),
        cluster_names=(CLUSTER_AXIS,) if tiles.shared else (),
        num_threads=tiles.consumers + tiles.loader,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return tuple(kernel(operands, tile_list))


def _scratch_types(
    operands: Operands, out_dtype: DTypeLike, tiles: Tiles, interpret: bool
) -> Scratch:
    row_dtype, weight_dtype = operands.rows.dtype, operands.weights[0].dtype

    def buffer(shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        itemsize = jnp.dtype(dtype).itemsize
        swizzle = min(SWIZZLE, shape[-1] * itemsize)
        tiling: Any = plgpu.TilingTransform((BLOCK_ROWS, swizzle // itemsize))  # type: ignore[abstract]
        return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))  # type: ignore[abstract]

    weights = (tiles.stages, tiles.out, tiles.inner)
    per_consumer = (tiles.consumers, tiles.consumer_out, tiles.inner)
    converts = interpret and row_dtype != weight_dtype
    output: Any = None
    edge: Any = None
    narrowing: Any = None
    if quantises(out_dtype):
        narrowing = Narrowing(
            values=plgpu.SMEM((tiles.narrowed_rows, tiles.out), out_dtype),
            scales=plgpu.SMEM((tiles.narrowed_rows,), jnp.float32),
        )
        if not tiles.rows_first:
            wide = plgpu.SMEM((tiles.narrowed_rows, tiles.out), jnp.float32)
            met = plgpu.Barrier(num_arrivals=tiles.consumers)
            narrowing = dataclasses.replace(narrowing, wide=wide, met=met)
    elif tiles.splits == 1:
        output = buffer((tiles.consumers, tiles.store_rows, tiles.store_columns), out_dtype)
        edge = plgpu.SMEM((tiles.consumers, BLOCK_ROWS, tiles.store_columns), out_dtype)
    with_scales = operands.row_block_scales is not None
    copies = 1 + len(operands.weights) + with_scales
    empty: Any = plgpu.Barrier(num_arrivals=tiles.consumers, num_barriers=tiles.stages)
    if tiles.shared:
        empty = plgpu.ClusterBarrier(
            collective_axes=(CLUSTER_AXIS,),
            num_arrivals=tiles.consumers,
            num_barriers=tiles.stages,
        )
    return Scratch(
        weights=tuple(buffer(weights, weight_dtype) for _ in operands.weights),
        rows=buffer((tiles.stages, tiles.rows, tiles.inner), row_dtype),
        scales=plgpu.SMEM((tiles.stages, tiles.scale_rows), jnp.float32) if with_scales else None,
        output=output,
        edge=edge,
        narrowing=narrowing,
        converted=buffer(per_consumer, row_dtype) if converts else None,
        full=plgpu.Barrier(num_arrivals=copies, num_barriers=tiles.stages),
        empty=empty,
    )
