"""The Hopper kernel for large groups in 8 bits by blocks: rows are wgmma's left operand.

Called by `mosaic_gpu_kernel.py`. Every sum over a block of d_in is scaled before it is added, so a
thread holds two sets of sums, which limits the size of a tile. The smaller a tile, the faster its
operands have to come from the L2 cache. With rows on the left, a thread's results belong to two
rows and need two scales; with weights on the left every other result has its own. Each row of a
tile lies in one warpgroup, which can quantise it in place. No warpgroup only loads
(`mosaic_gpu_ahead.py`), so the two that multiply, 64 rows each and all columns, have enough
registers.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.mosaic_gpu_ahead import Carry, now, refill, zero
from pallas_kernels.grouped_matmul.mosaic_gpu_narrowing import store_quantised_rows
from pallas_kernels.grouped_matmul.mosaic_gpu_results import (
    accumulator,
    block_scales,
    scaled_by_channel,
    store,
)
from pallas_kernels.grouped_matmul.mosaic_gpu_types import (
    PART_COLUMNS,
    Context,
    Epilogue,
    Ref,
    Tile,
)
from pallas_kernels.grouped_matmul.mosaic_gpu_walk import release, wait_until_loaded
from pallas_kernels.grouped_matmul.tile_list import BLOCK_ROWS

Sums = tuple[tuple[jax.Array, ...], ...]
"""Sums for every weight and every part of its columns: FP32 [consumer_rows, PART_COLUMNS]."""


def compute_tile(
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
    sums, carry = _sums(context, warpgroup, carry, rows, out_tile)
    shape = tiles.consumer_rows, PART_COLUMNS
    for part, products in enumerate(zip(*sums, strict=True)):
        column = out_tile * tiles.out + part * PART_COLUMNS
        scaled = scaled_by_channel(context, products, tile, column, shape, axis=1)
        result = epilogue(*scaled)
        if context.scratch.narrowing is not None:
            store_quantised_rows(context, first_block, result, tile, out_tile)
            continue
        _store(context, warpgroup, result, rows, column)
    return carry


def _sums(
    context: Context, warpgroup: jax.Array, carry: Carry, rows: Tile, out_tile: jax.Array
) -> tuple[Sums, Carry]:
    """Returns an output tile's products before scales of channels. Every step has fresh sums."""
    operands, tiles = context.operands, context.tiles
    scratch: Any = context.scratch
    shape = tiles.consumer_rows, PART_COLUMNS
    left_rows = pl.ds(warpgroup * tiles.consumer_rows, tiles.consumer_rows)
    parts = range(tiles.out // PART_COLUMNS)
    zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)

    def add_step(index: jax.Array, state: tuple[Sums, Carry]) -> tuple[Sums, Carry]:
        totals, (step, cursor) = state
        cursor = refill(context, warpgroup, step, cursor)
        stage = context.stage_of(step)
        wait_until_loaded(context, stage)
        layout, scales = plgpu.Layout.WGMMA.reduce(1), scratch.scales.at[stage, left_rows]
        of_rows = plgpu.load(scales, layout=layout, optimized=False)
        left = scratch.rows.at[stage, left_rows]

        def add(number: int, part: int) -> jax.Array:
            def run(sums: Ref) -> jax.Array:
                first = part * PART_COLUMNS
                columns = pl.ds(first, PART_COLUMNS)
                right = scratch.weights[number].at[stage, columns].transpose((1, 0))
                plgpu.wgmma(sums, left, right)
                scale = block_scales(context, rows, out_tile * tiles.out + first, index)[number]
                factor = of_rows if scale is None else of_rows * scale
                factor = jax.lax.broadcast_in_dim(factor + zero(), shape, (0,))
                total, found = totals[number][part], sums[...].astype(jnp.float32)
                return now(step, lambda: total + found * factor, total)

            return pl.run_scoped(run, accumulator(context, shape))

        added = tuple(tuple(add(number, part) for part in parts) for number in range(len(totals)))
        release(context, stage)
        return added, (step + 1, cursor)

    totals = tuple(tuple(zeros for _ in parts) for _ in operands.weights)
    return jax.lax.fori_loop(0, context.steps_of(rows), add_step, (totals, carry))


def _store(
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
        store(context, warpgroup, rows, column + first)
