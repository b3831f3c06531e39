"""Quantises a tile of results in the consumers of the Hopper kernel: in blocks of the rows.

Called by both kinds of consumers. A row of an output tile gets one scale. Where weights are first,
its columns are spread over all consumers, and over all warps of each, so that the tile goes through
shared memory in FP32: afterwards every consumer has whole rows, and a warp has two of them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.mosaic_gpu_types import ROWS_LAYOUT, Context, Narrowing, Tile
from pallas_kernels.grouped_matmul.tile_list import BLOCK_ROWS
from pallas_kernels.mosaic_gpu import quantise, store


def store_quantised(
    context: Context, consumer: jax.Array, result: jax.Array, tile: Tile, out_tile: jax.Array
) -> None:
    """Stores the rows of an output tile that belong to its group, and no others.

    Args:
      result: this consumer's columns, FP32 [consumer_out, rows of the tile].
    """
    tiles, rows = context.tiles, result.shape[1]
    buffers: Any = context.scratch.narrowing
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    meet(buffers)  # All are done with the buffers of the tile before.
    columns = pl.ds(consumer * tiles.consumer_out, tiles.consumer_out)
    result = plgpu.layout_cast(result, plgpu.Layout.WGMMA_TRANSPOSED)
    store(buffers.wide.at[:, columns].transpose((1, 0)), result)
    plgpu.commit_smem()
    meet(buffers)

    def for_each_block(body: Any) -> None:
        def run(index: jax.Array, _: None) -> None:
            body((index * tiles.consumers + consumer) * BLOCK_ROWS)

        jax.lax.fori_loop(0, rows // BLOCK_ROWS // tiles.consumers, run, None)

    for_each_block(lambda row: _quantise(buffers, pl.ds(row, BLOCK_ROWS)))
    plgpu.commit_smem()
    for_each_block(lambda row: _copy(context, buffers, tile, out_tile, row))


def meet(buffers: Narrowing) -> None:
    """Waits for all consumers."""
    met: Any = buffers.met
    plgpu.barrier_arrive(met)
    plgpu.barrier_wait(met)


def _quantise(buffers: Narrowing, rows: Any) -> None:
    """Quantises a few whole rows."""
    wide: Any = buffers.wide
    _keep(buffers, rows, plgpu.load(wide.at[rows], layout=ROWS_LAYOUT, optimized=False))


def _keep(buffers: Narrowing, rows: Any, wide: jax.Array) -> None:
    """Quantises whole rows, into the buffers."""
    values, scales = quantise(wide, buffers.values.dtype)
    store(buffers.values.at[rows], values)
    store(buffers.scales.at[rows], scales)


def store_quantised_rows(
    context: Context, first_block: jax.Array, result: jax.Array, tile: Tile, out_tile: jax.Array
) -> None:
    """Stores a warpgroup's rows of an output tile that belong to its group, and no others.

    Args:
      first_block: this warpgroup's first block of `BLOCK_ROWS` rows of the tile.
      result: FP32 [consumer_rows, tiles.out].
    """
    buffers: Any = context.scratch.narrowing
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    _keep(buffers, pl.ds(first_block * BLOCK_ROWS, result.shape[0]), result)
    plgpu.commit_smem()

    def copy(block: jax.Array, _: None) -> None:
        _copy(context, buffers, tile, out_tile, block * BLOCK_ROWS)

    blocks = result.shape[0] // BLOCK_ROWS
    jax.lax.fori_loop(first_block, first_block + blocks, copy, None)


def _copy(
    context: Context, buffers: Narrowing, tile: Tile, out_tile: jax.Array, row: jax.Array
) -> None:
    """Copies those of the tile's `BLOCK_ROWS` rows from `row` on that belong to its group."""
    tiles = context.tiles
    output_scales: Any = context.output_scales
    columns = pl.ds(out_tile * tiles.out, tiles.out)
    first = tile.block * BLOCK_ROWS  # row of the output that is row 0 of the tile
    begin, end = jnp.maximum(tile.begin, row), jnp.minimum(tile.end, row + BLOCK_ROWS)

    def copy_rows(row: jax.Array, count: int) -> None:
        plgpu.copy_smem_to_gmem(
            buffers.values.at[pl.ds(row, count)],
            context.output.at[pl.ds(first + row, count), columns],
        )

    def copy_block() -> None:
        copy_rows(row, BLOCK_ROWS)
        layout = ROWS_LAYOUT.reduce(1)
        rows = pl.ds(row, BLOCK_ROWS)
        scales = plgpu.load(buffers.scales.at[rows], layout=layout, optimized=False)
        store(output_scales.at[out_tile, pl.ds(first + row, BLOCK_ROWS)], scales)

    def copy_row(row: jax.Array, _: None) -> None:
        copy_rows(row, 1)
        output_scales[out_tile, first + row] = buffers.scales[row]

    jax.lax.cond(
        end - begin == BLOCK_ROWS,
        copy_block,
        lambda: jax.lax.fori_loop(begin, jnp.maximum(begin, end), copy_row, None),
    )
