"""The Hopper kernel with weights as wgmma's left operand: its loading and multiplying warpgroups.

Called by `mosaic_gpu_kernel.py`. Products are transposed: [consumer_out, rows] of a tile.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic_gpu
from pallas_kernels.grouped_matmul.mosaic_gpu_results import (
    accumulator,
    block_scales,
    scaled_by_channel,
    spread,
    store_quantised,
    store_rows,
)
from pallas_kernels.grouped_matmul.mosaic_gpu_types import Context, Epilogue, Ref, Tile
from pallas_kernels.grouped_matmul.mosaic_gpu_walk import (
    for_each_tile,
    load_step,
    release,
    wait_until_free,
    wait_until_loaded,
)
from pallas_kernels.grouped_matmul.tile_list import BLOCK_ROWS

Products = tuple[jax.Array, ...]


def load(context: Context) -> None:
    """Runs the warpgroup that loads: the operands of all steps, as buffers become free."""

    def load_tile(step: jax.Array, tile: Tile, out_tile: jax.Array) -> jax.Array:
        def run(index: jax.Array, step: jax.Array) -> jax.Array:
            stage = context.stage_of(step)
            wait_until_free(context, stage)
            inner = context.inner_of(tile, index)
            load_step(context, tile.group, tile.block, out_tile, inner, stage)
            return step + 1

        return jax.lax.fori_loop(0, context.steps_of(tile), run, step)

    # A stage's first use waits as well: `compute` releases all of them before it begins, so that
    # waits and releases always pair.
    for_each_tile(context, jnp.int32(0), load_tile)
    for stage in range(context.tiles.stages):  # no arrival is left unseen
        wait_until_free(context, stage)


def compute(context: Context, epilogue: Epilogue, consumer: jax.Array) -> None:
    """Runs a warpgroup that multiplies: its part of all output tiles."""
    for stage in range(context.tiles.stages):
        release(context, stage)
    for_each_tile(
        context,
        jnp.int32(0),
        lambda *arguments: _compute_tile(context, epilogue, consumer, *arguments),
    )


def _compute_tile(
    context: Context,
    epilogue: Epilogue,
    consumer: jax.Array,
    step: jax.Array,
    tile: Tile,
    out_tile: jax.Array,
) -> jax.Array:
    """Computes and stores this consumer's part of one output tile; returns the next step."""
    tiles, scratch = context.tiles, context.scratch
    column = out_tile * tiles.out + consumer * tiles.consumer_out
    operands = context.operands
    if operands.block_scales or operands.row_block_scales is not None:
        products, step = _products_of_blocks(context, consumer, step, tile, column)
    else:
        products, step = _products(context, consumer, step, tile)
    result = epilogue(*_scale(context, products, tile, column))
    if tiles.splits > 1:
        rows = pl.ds(tile.block * BLOCK_ROWS, tiles.rows)
        columns = pl.ds(column, tiles.consumer_out)
        mosaic_gpu.store(context.output.at[tile.split, columns, rows], result)
        return step
    if scratch.narrowing is not None:
        store_quantised(context, consumer, result, tile, out_tile)
        return step
    output: Any = scratch.output
    result = result.astype(context.output.dtype)
    result = plgpu.layout_cast(result, plgpu.Layout.WGMMA_TRANSPOSED)
    for first in range(0, tiles.rows, tiles.store_rows):
        # The buffer holds the part before, which TMA may still be reading; it need not be written.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        part = result[:, first : first + tiles.store_rows]
        output.at[consumer].transpose((1, 0))[...] = part
        plgpu.commit_smem()
        store_rows(context, consumer, tile.part(first // BLOCK_ROWS, tiles.store_rows), column)
    return step


def _products(
    context: Context, consumer: jax.Array, step: jax.Array, tile: Tile
) -> tuple[Products, jax.Array]:
    """Returns the FP32 products of one output tile, and the next step of the ring.

    With both operands in SMEM, products of one step stay in flight while the next ones are issued,
    so a stage is given back a step late. With weights converted in registers they do not: the other
    consumer's products run during the conversion.
    """
    late = 0 if _converts(context) else 1
    steps = context.steps_of(tile)

    def run(accumulators: list[Ref]) -> tuple[Products, jax.Array]:
        def multiply(index: jax.Array, step: jax.Array) -> jax.Array:
            stage = context.stage_of(step)
            wait_until_loaded(context, stage)
            for number, sums in enumerate(accumulators):
                _multiply(context, consumer, sums, number, stage)
            # All but the products just issued are done. So the stage before is free, this one is
            # not: given back now, it would be loaded over while wgmma reads it.
            plgpu.wgmma_wait(late * len(accumulators))
            pl.when(index >= late)(lambda: release(context, context.stage_of(step - late)))
            return step + 1

        end = jax.lax.fori_loop(0, steps, multiply, step)
        # Reading the sums waits for all products, and with them for the last stage's operands.
        products = tuple(sums[...].astype(jnp.float32) for sums in accumulators)
        if late:
            pl.when(steps > 0)(lambda: release(context, context.stage_of(end - 1)))
        return products, end

    shape = (context.tiles.consumer_out, context.tiles.rows)
    return pl.run_scoped(run, [accumulator(context, shape) for _ in context.operands.weights])


def _products_of_blocks(
    context: Context, consumer: jax.Array, step: jax.Array, tile: Tile, column: jax.Array
) -> tuple[Products, jax.Array]:
    """Like `_products`, with a scale for every block of the weights, of the rows, or of both.

    Every step has fresh sums. For FP8 this also improves precision: within wgmma, sums of FP8
    products have fewer bits than FP32.
    """
    operands, tiles = context.operands, context.tiles
    shape = (tiles.consumer_out, tiles.rows)

    def add_step(index: jax.Array, carry: tuple[Products, jax.Array]) -> Any:
        totals, step = carry
        stage = context.stage_of(step)
        # Loaded before anything is waited for, so that the loads' latency is hidden.
        scales = block_scales(context, tile, column, context.inner_of(tile, index))
        wait_until_loaded(context, stage)
        added = []
        # One after the other: registers suffice for one sum beside the totals.
        for number, (total, scale) in enumerate(zip(totals, scales, strict=True)):

            def run(sums: Ref, number: int = number, scale: Any = scale) -> jax.Array:
                _multiply(context, consumer, sums, number, stage)
                factor = scale
                if operands.row_block_scales is not None:  # while the tensor cores are at work
                    scales: Any = context.scratch.scales
                    of_rows = scales.at[stage, pl.ds(0, tiles.rows)]
                    row_scales = mosaic_gpu.load(of_rows, plgpu.Layout.WGMMA.reduce(0))
                    factor = row_scales if scale is None else row_scales * scale
                    factor = jax.lax.broadcast_in_dim(factor, shape, (1,))
                return sums[...].astype(jnp.float32) * factor

            added.append(total + pl.run_scoped(run, accumulator(context, shape)))
        release(context, stage)
        return tuple(added), step + 1

    zeros = jnp.zeros(shape, jnp.float32)
    zeros = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
    totals = tuple(zeros for _ in operands.weights)
    return jax.lax.fori_loop(0, context.steps_of(tile), add_step, (totals, step))


def _converts(context: Context) -> bool:
    """Whether weights are converted to the dtype of the rows."""
    return context.operands.rows.dtype != context.operands.weights[0].dtype


def _multiply(
    context: Context, consumer: jax.Array, sums: Ref, number: int, stage: jax.Array
) -> None:
    """Starts to add this consumer's part of the weights of a stage times its rows."""
    tiles, scratch = context.tiles, context.scratch
    part = pl.ds(consumer * tiles.consumer_out, tiles.consumer_out)
    left = scratch.weights[number].at[stage, part]
    if _converts(context):
        converted = left[...].astype(scratch.rows.dtype)
        if scratch.converted is None:
            left = converted
        else:  # interpreted, where operands are not taken from registers
            scratch.converted[consumer] = converted
            plgpu.commit_smem()
            left = scratch.converted.at[consumer]
    plgpu.wgmma(sums, left, scratch.rows.at[stage].transpose((1, 0)))


def _scale(context: Context, products: Products, tile: Tile, column: jax.Array) -> Products:
    """Returns the products times the scales of channels and rows; zeros for padding rows."""
    tiles, operands = context.tiles, context.operands
    shape = (tiles.consumer_out, tiles.rows)
    products = scaled_by_channel(context, products, tile, column, shape, axis=0)
    if operands.row_scales is not None:
        rows = pl.ds(tile.block * BLOCK_ROWS, tiles.rows)
        scales = spread(context, operands.row_scales.at[rows], tile, shape, axis=1)
        products = tuple(product * scales for product in products)
    return products
