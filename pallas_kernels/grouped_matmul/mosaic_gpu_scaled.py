"""The Hopper kernel for groups of some and of many rows in 8 bits by blocks, where every sum over a
block of d_in is scaled before it is added.

Called by `mosaic_gpu_kernel.py`. A thread holds two sets of sums, which limits the size of a tile.
The smaller a tile, the faster its operands have to come from the L2 cache. No warpgroup only loads
(`mosaic_gpu_walk.py`), so that the others have enough registers.

Many rows are wgmma's left operand: a thread's results then belong to two rows and need two scales;
with weights on the left every other result has its own. Each row of a tile lies in one warpgroup,
which can quantise it in place. A group of slightly more than 128 rows would be two tiles and read
its weights twice. So for some rows weights are on the left, and a tile may have any multiple of 8
rows. Its rows are summed up in parts, one after the other, and quantised a few at a time, which
saves shared memory.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.mosaic_gpu_results import (
    accumulator,
    block_scales,
    scaled_by_channel,
    store_quantised,
    store_quantised_rows,
    store_rows,
)
from pallas_kernels.grouped_matmul.mosaic_gpu_types import (
    PART_COLUMNS,
    ROW_PARTS,
    Context,
    Epilogue,
    Ref,
    Tile,
)
from pallas_kernels.grouped_matmul.mosaic_gpu_walk import (
    Carry,
    now,
    refill,
    release,
    wait_until_loaded,
    zero,
)
from pallas_kernels.grouped_matmul.tile_list import BLOCK_ROWS
from pallas_kernels.mosaic_gpu import load

Sums = tuple[tuple[jax.Array, ...], ...]
"""Sums for every weight and every part of the rows, or of the columns: FP32 [consumer_out,
store_rows], or [consumer_rows, PART_COLUMNS]."""

Multiply = Callable[[Ref, int, int], jax.Array]
"""Adds the product with a weight, of a part, to sums; returns their factors, along one axis."""


def _sum_up(
    context: Context,
    warpgroup: jax.Array,
    carry: Carry,
    tile: Tile,
    parts: int,
    shape: tuple[int, int],
    axis: int,
    begin: Callable[[jax.Array], Callable[[jax.Array], Multiply]],
) -> tuple[Sums, Carry]:
    """Returns an output tile's products before scales of channels. Every step has fresh sums.

    Args:
      shape, axis: shape of the sums of a part, and the axis along which factors lie.
      begin: begins a step before anything is waited for; once its stage is loaded, the result
        returns the function that multiplies.
    """
    zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)

    def add_step(index: jax.Array, state: tuple[Sums, Carry]) -> tuple[Sums, Carry]:
        totals, (step, cursor) = state
        loaded = begin(index)
        # Before the wait for this step's operands: the copies of a later one are under way while
        # this warpgroup waits and multiplies.
        cursor = refill(context, warpgroup, step, cursor)
        stage = context.stage_of(step)
        wait_until_loaded(context, stage)
        multiply = loaded(stage)

        def add(number: int, part: int) -> jax.Array:
            def run(sums: Ref) -> jax.Array:
                factor = multiply(sums, number, part)
                factor = jax.lax.broadcast_in_dim(factor + zero(), shape, (axis,))
                total, found = totals[number][part], sums[...].astype(jnp.float32)
                return now(step, lambda: total + found * factor, total)

            return pl.run_scoped(run, accumulator(context, shape))

        added = tuple(
            tuple(add(number, part) for part in range(parts)) for number in range(len(totals))
        )
        # Every part has read its sums, so no wgmma reads the stage any more.
        release(context, stage)
        return added, (step + 1, cursor)

    totals = tuple((zeros,) * parts for _ in context.operands.weights)
    return jax.lax.fori_loop(0, context.steps_of(tile), add_step, (totals, carry))


def compute_in_parts(
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
    sums, carry = _sums_in_parts(context, consumer, carry, tile, column)
    count = tiles.store_rows
    for part, products in enumerate(zip(*sums, strict=True)):
        first = part * count
        result = epilogue(*_scaled(context, products, tile, column))
        if context.scratch.narrowing is None:
            of_part = tile.part(first // BLOCK_ROWS, count)
            _store_part(context, consumer, result, of_part, column)
            continue
        for row in range(0, count, tiles.narrowed_rows):
            rows = result[:, row : row + tiles.narrowed_rows]
            of_rows = tile.part((first + row) // BLOCK_ROWS, tiles.narrowed_rows)
            store_quantised(context, consumer, rows, of_rows, out_tile)
    return carry


def _sums_in_parts(
    context: Context, consumer: jax.Array, carry: Carry, tile: Tile, column: jax.Array
) -> tuple[Sums, Carry]:
    tiles = context.tiles
    scratch: Any = context.scratch
    columns = pl.ds(consumer * tiles.consumer_out, tiles.consumer_out)
    shape = tiles.consumer_out, tiles.store_rows

    def begin(index: jax.Array) -> Callable[[jax.Array], Multiply]:
        # Loaded before anything is waited for, so that the loads' latency is hidden.
        scales = block_scales(context, tile, column, index)

        def loaded(stage: jax.Array) -> Multiply:
            def multiply(sums: Ref, number: int, part: int) -> jax.Array:
                rows = pl.ds(part * tiles.store_rows, tiles.store_rows)
                left = scratch.weights[number].at[stage, columns]
                plgpu.wgmma(sums, left, scratch.rows.at[stage, rows].transpose((1, 0)))
                factor = load(scratch.scales.at[stage, rows], plgpu.Layout.WGMMA.reduce(0))
                scale = scales[number]
                return factor if scale is None else factor * scale

            return multiply

        return loaded

    return _sum_up(context, consumer, carry, tile, ROW_PARTS, shape, 1, begin)


def _scaled(
    context: Context, products: tuple[jax.Array, ...], tile: Tile, column: jax.Array
) -> tuple[jax.Array, ...]:
    tiles, scales = context.tiles, context.operands.channel_scales
    if scales:  # columns that do not exist read other columns' scales, and are not stored
        column = jnp.minimum(column, scales[0].shape[1] - tiles.consumer_out)
    shape = tiles.consumer_out, tiles.store_rows
    return scaled_by_channel(context, products, tile, column, shape, axis=0)


def _store_part(
    context: Context, consumer: jax.Array, result: jax.Array, rows: Tile, column: jax.Array
) -> None:
    """Stores this consumer's columns of a part of the rows."""
    output: Any = context.scratch.output
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    result = result.astype(context.output.dtype)
    result = plgpu.layout_cast(result, plgpu.Layout.WGMMA_TRANSPOSED)
    output.at[consumer].transpose((1, 0))[...] = result
    plgpu.commit_smem()
    store_rows(context, consumer, rows, column)


def compute_rows_first(
    context: Context,
    epilogue: Epilogue,
    warpgroup: jax.Array,
    carry: Carry,
    tile: Tile,
    out_tile: jax.Array,
) -> Carry:
    """Computes and stores this warpgroup's rows of one output tile."""
    tiles = context.tiles
    first_block = warpgroup * (tiles.consumer_rows // BLOCK_ROWS)
    rows = tile.part(first_block, tiles.consumer_rows)
    sums, carry = _sums_rows_first(context, warpgroup, carry, rows, out_tile)
    shape = tiles.consumer_rows, PART_COLUMNS
    for part, products in enumerate(zip(*sums, strict=True)):
        column = out_tile * tiles.out + part * PART_COLUMNS
        scaled = scaled_by_channel(context, products, tile, column, shape, axis=1)
        result = epilogue(*scaled)
        if context.scratch.narrowing is not None:
            store_quantised_rows(context, first_block, result, tile, out_tile)
            continue
        _store_columns(context, warpgroup, result, rows, column)
    return carry


def _sums_rows_first(
    context: Context, warpgroup: jax.Array, carry: Carry, rows: Tile, out_tile: jax.Array
) -> tuple[Sums, Carry]:
    tiles = context.tiles
    scratch: Any = context.scratch
    shape = tiles.consumer_rows, PART_COLUMNS
    left_rows = pl.ds(warpgroup * tiles.consumer_rows, tiles.consumer_rows)

    def begin(index: jax.Array) -> Callable[[jax.Array], Multiply]:
        def loaded(stage: jax.Array) -> Multiply:
            of_rows = load(scratch.scales.at[stage, left_rows], plgpu.Layout.WGMMA.reduce(1))
            left = scratch.rows.at[stage, left_rows]

            def multiply(sums: Ref, number: int, part: int) -> jax.Array:
                first = part * PART_COLUMNS
                columns = pl.ds(first, PART_COLUMNS)
                right = scratch.weights[number].at[stage, columns].transpose((1, 0))
                plgpu.wgmma(sums, left, right)
                scale = block_scales(context, rows, out_tile * tiles.out + first, index)[number]
                return of_rows if scale is None else of_rows * scale

            return multiply

        return loaded

    parts = tiles.out // PART_COLUMNS
    return _sum_up(context, warpgroup, carry, rows, parts, shape, 0, begin)


def _store_columns(
    context: Context, warpgroup: jax.Array, result: jax.Array, rows: Tile, column: jax.Array
) -> None:
    """Stores this warpgroup's rows of a part of an output tile, some columns at a time."""
    width = context.tiles.store_columns
    output: Any = context.scratch.output
    result = result.astype(context.output.dtype)
    for first in range(0, PART_COLUMNS, width):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        output[warpgroup] = result[:, first : first + width]
        plgpu.commit_smem()
        store_rows(context, warpgroup, rows, column + first)
