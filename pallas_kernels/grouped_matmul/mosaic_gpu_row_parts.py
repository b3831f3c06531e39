"""The Hopper kernel for medium-sized groups in 8 bits by blocks: weights are wgmma's left operand,
and all rows of a group are in one tile.

Called by `mosaic_gpu_kernel.py`. With rows on the left, a group of slightly more than 128 rows
would be two tiles and read its weights twice. With weights on the left, a tile may have any
multiple of 8 rows. Every sum over a block of d_in is scaled before it is added, so a thread holds
two sets of sums. Rows of a tile are therefore summed up in parts, one after the other, and no
warpgroup only loads (`mosaic_gpu_ahead.py`). Rows are quantised a few at a time, which saves
shared memory.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.mosaic_gpu_ahead import Carry, now, refill, zero
from pallas_kernels.grouped_matmul.mosaic_gpu_narrowing import store_quantised
from pallas_kernels.grouped_matmul.mosaic_gpu_results import (
    accumulator,
    block_scales,
    scaled_by_channel,
    store,
)
from pallas_kernels.grouped_matmul.mosaic_gpu_types import ROW_PARTS, Context, Epilogue, Ref, Tile
from pallas_kernels.grouped_matmul.mosaic_gpu_walk import release, wait_until_loaded
from pallas_kernels.grouped_matmul.tile_list import BLOCK_ROWS

Sums = tuple[tuple[jax.Array, ...], ...]
"""Sums for every weight and every part of the rows: FP32 [consumer_out, store_rows]."""


def compute_tile(
    context: Context,
    epilogue: Epilogue,
    consumer: jax.Array,
    carry: Carry,
    tile: Tile,
    out_tile: jax.Array,
) -> Carry:
    """Computes and stores this consumer's columns of one output tile."""
    tiles = context.tiles
    column = out_tile * tiles.out + consumer * tiles.consumer_out
    sums, carry = _sums(context, consumer, carry, tile, column)
    count = tiles.store_rows
    for part, products in enumerate(zip(*sums, strict=True)):
        first = part * count
        result = epilogue(*_scaled(context, products, tile, column))
        if context.scratch.narrowing is None:
            of_part = tile.part(first // BLOCK_ROWS, count)
            _store(context, consumer, result, of_part, column)
            continue
        for row in range(0, count, tiles.narrowed_rows):
            rows = result[:, row : row + tiles.narrowed_rows]
            of_rows = tile.part((first + row) // BLOCK_ROWS, tiles.narrowed_rows)
            store_quantised(context, consumer, rows, of_rows, out_tile)
    return carry


def _sums(
    context: Context, consumer: jax.Array, carry: Carry, tile: Tile, column: jax.Array
) -> tuple[Sums, Carry]:
    """Returns an output tile's products before scales of channels. Every step has fresh sums."""
    tiles = context.tiles
    scratch: Any = context.scratch
    columns = pl.ds(consumer * tiles.consumer_out, tiles.consumer_out)
    shape = tiles.consumer_out, tiles.store_rows
    zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)

    def add_step(index: jax.Array, state: tuple[Sums, Carry]) -> tuple[Sums, Carry]:
        totals, (step, cursor) = state
        # Loaded before anything is waited for, so that the loads' latency is hidden.
        scales = block_scales(context, tile, column, index)
        cursor = refill(context, consumer, step, cursor)
        stage = context.stage_of(step)
        wait_until_loaded(context, stage)

        def add(number: int, part: int) -> jax.Array:
            rows = pl.ds(part * tiles.store_rows, tiles.store_rows)

            def run(sums: Ref) -> jax.Array:
                left = scratch.weights[number].at[stage, columns]
                plgpu.wgmma(sums, left, scratch.rows.at[stage, rows].transpose((1, 0)))
                layout, of_rows = plgpu.Layout.WGMMA.reduce(0), scratch.scales.at[stage, rows]
                factor = plgpu.load(of_rows, layout=layout, optimized=False)
                scale = scales[number]
                factor = factor if scale is None else factor * scale
                factor = jax.lax.broadcast_in_dim(factor + zero(), shape, (1,))
                total, found = totals[number][part], sums[...].astype(jnp.float32)
                return now(step, lambda: total + found * factor, total)

            return pl.run_scoped(run, accumulator(context, shape))

        added = tuple(
            tuple(add(number, part) for part in range(ROW_PARTS)) for number in range(len(totals))
        )
        release(context, stage)
        return added, (step + 1, cursor)

    totals = tuple((zeros,) * ROW_PARTS for _ in context.operands.weights)
    return jax.lax.fori_loop(0, context.steps_of(tile), add_step, (totals, carry))


def _scaled(
    context: Context, products: tuple[jax.Array, ...], tile: Tile, column: jax.Array
) -> tuple[jax.Array, ...]:
    tiles, scales = context.tiles, context.operands.channel_scales
    if scales:  # columns that do not exist read other columns' scales, and are not stored
        column = jnp.minimum(column, scales[0].shape[1] - tiles.consumer_out)
    shape = tiles.consumer_out, tiles.store_rows
    return scaled_by_channel(context, products, tile, column, shape, axis=0)


def _store(
    context: Context, consumer: jax.Array, result: jax.Array, rows: Tile, column: jax.Array
) -> None:
    """Stores this consumer's columns of a part of the rows."""
    output: Any = context.scratch.output
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    result = result.astype(context.output.dtype)
    result = plgpu.layout_cast(result, plgpu.Layout.WGMMA_TRANSPOSED)
    output.at[consumer].transpose((1, 0))[...] = result
    plgpu.commit_smem()
    store(context, consumer, rows, column)
