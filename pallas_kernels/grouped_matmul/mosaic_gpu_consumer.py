"""What a consumer warpgroup of the Hopper kernel does: multiply, scale, apply the epilogue, store.

Called by `mosaic_gpu_kernel.py`. Products are transposed: [consumer_out, rows] of a tile.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.mosaic_gpu_narrowing import store_quantised
from pallas_kernels.grouped_matmul.mosaic_gpu_types import (
    ROWS_LAYOUT,
    Context,
    Epilogue,
    Ref,
    Tile,
)
from pallas_kernels.grouped_matmul.tile_list import BLOCK_ROWS

Products = tuple[jax.Array, ...]


def prepare(context: Context) -> None:
    """Give all buffers to the producer."""
    for stage in range(context.tiles.stages):
        plgpu.barrier_arrive(context.scratch.empty.at[stage])


def wait_for_stores() -> None:
    """Before the end: the results have left SMEM and are in memory."""
    plgpu.wait_smem_to_gmem(0)


def compute_tile(
    context: Context,
    epilogue: Epilogue,
    consumer: jax.Array,
    step: jax.Array,
    tile: Tile,
    out_tile: jax.Array,
) -> jax.Array:
    """Compute and store this consumer's part of one output tile; returns the next step."""
    tiles, scratch = context.tiles, context.scratch
    column = out_tile * tiles.out + consumer * tiles.consumer_out
    operands = context.operands
    if operands.block_scales or operands.row_block_scales is not None:
        products, step = _products_of_blocks(context, consumer, step, tile, column)
    else:
        products, step = _products(context, consumer, step, tile)
    result = epilogue(*_scale(context, products, tile, column))
    if scratch.narrowing is not None:
        store_quantised(context, consumer, result, tile, out_tile)
        return step
    output: Any = scratch.output
    result = result.astype(context.output.dtype)
    result = plgpu.layout_cast(result, plgpu.Layout.WGMMA_TRANSPOSED)
    for first in range(0, tiles.rows, tiles.store_rows):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        part = result[:, first : first + tiles.store_rows]
        output.at[consumer].transpose((1, 0))[...] = part
        plgpu.commit_smem()
        _store(context, consumer, tile.part(first, tiles.store_rows), column)
    return step


def _products(
    context: Context, consumer: jax.Array, step: jax.Array, tile: Tile
) -> tuple[Products, jax.Array]:
    """The FP32 products of one output tile, and the next step of the ring.

    Operands in SMEM leave one step's products in flight while the next ones are issued, so that a
    stage is given back a step late. Those from registers do not: the other consumer's products
    run while these are converted.
    """
    late = 0 if _converts(context) else 1
    steps = context.steps_of(tile)

    def run(accumulators: list[Ref]) -> tuple[Products, jax.Array]:
        def multiply(index: jax.Array, step: jax.Array) -> jax.Array:
            stage = context.stage_of(step)
            wait_until_loaded(context, stage)
            for number, accumulator in enumerate(accumulators):
                _multiply(context, consumer, accumulator, number, stage)
            plgpu.wgmma_wait(late * len(accumulators))
            pl.when(index >= late)(lambda: _release(context, step - late))
            return step + 1

        end = jax.lax.fori_loop(0, steps, multiply, step)
        products = tuple(accumulator[...].astype(jnp.float32) for accumulator in accumulators)
        if late:
            pl.when(steps > 0)(lambda: _release(context, end - 1))
        return products, end

    return pl.run_scoped(run, [_accumulator(context) for _ in context.operands.weights])


def _products_of_blocks(
    context: Context, consumer: jax.Array, step: jax.Array, tile: Tile, column: jax.Array
) -> tuple[Products, jax.Array]:
    """As `_products`, with a scale for every block of the weights or of the rows, or for both.

    Every step has fresh sums. For FP8 that is not only for the scales' sake: within wgmma, sums of
    FP8 products have fewer bits than FP32.
    """
    operands, tiles = context.operands, context.tiles
    shape = (tiles.consumer_out, tiles.rows)
    rows = pl.ds(tile.block * BLOCK_ROWS, tiles.rows)

    def add_step(index: jax.Array, carry: tuple[Products, jax.Array]) -> Any:
        totals, step = carry
        stage = context.stage_of(step)
        # Loaded before anything is waited for, so that the loads' latency is hidden.
        scales: list[Any] = [None] * len(totals)
        if operands.block_scales:
            block_out, block_in = operands.block
            column_block = jax.lax.div(column, block_out)
            block = jax.lax.div(index * tiles.inner, block_in)
            scales = [scales[tile.group, column_block, block] for scales in operands.block_scales]
        wait_until_loaded(context, stage)
        added = []
        # One after the other: registers suffice for one sum beside the totals.
        for number, (total, scale) in enumerate(zip(totals, scales, strict=True)):

            def run(accumulator: Ref, number: int = number, scale: Any = scale) -> jax.Array:
                _multiply(context, consumer, accumulator, number, stage)
                factor = scale
                if operands.row_block_scales is not None:  # while the tensor cores are at work
                    row_scales = plgpu.load(
                        operands.row_block_scales.at[index, rows],
                        layout=plgpu.Layout.WGMMA.reduce(0),
                        optimized=False,
                    )
                    factor = row_scales if scale is None else row_scales * scale
                    factor = jax.lax.broadcast_in_dim(factor, shape, (1,))
                return accumulator[...].astype(jnp.float32) * factor

            added.append(total + pl.run_scoped(run, _accumulator(context)))
        _release(context, step)
        return tuple(added), step + 1

    zeros = jnp.zeros(shape, jnp.float32)
    zeros = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
    totals = tuple(zeros for _ in operands.weights)
    return jax.lax.fori_loop(0, context.steps_of(tile), add_step, (totals, step))


def _accumulator(context: Context) -> Any:
    is_int8 = context.operands.rows.dtype == jnp.int8
    shape = (context.tiles.consumer_out, context.tiles.rows)
    return plgpu.ACC(shape, jnp.int32 if is_int8 else jnp.float32)


def _converts(context: Context) -> bool:
    """Whether weights are converted to the dtype of the rows."""
    return context.operands.rows.dtype != context.operands.weights[0].dtype


def _multiply(
    context: Context, consumer: jax.Array, accumulator: Ref, number: int, stage: jax.Array
) -> None:
    """Start to add this consumer's part of the weights of a stage times its rows."""
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
    plgpu.wgmma(accumulator, left, scratch.rows.at[stage].transpose((1, 0)))


def wait_until_loaded(context: Context, stage: jax.Array) -> None:
    """Until the copies into the buffers of a stage have arrived."""
    plgpu.barrier_wait(context.scratch.full.at[stage])


def _release(context: Context, step: jax.Array) -> None:
    """Give the buffers of a step back to the producer."""
    plgpu.barrier_arrive(context.scratch.empty.at[context.stage_of(step)])


def _scale(context: Context, products: Products, tile: Tile, column: jax.Array) -> Products:
    """The products times the scales of their channels and of their rows; zeros for padding rows."""
    tiles, operands = context.tiles, context.operands
    shape = (tiles.consumer_out, tiles.rows)
    is_real = tile.group < context.groups

    def broadcast(scales: Ref, axis: int) -> jax.Array:
        """Along one axis of a product, as wgmma spreads it over the threads.

        Scales of padding rows may be anything, NaN included.
        """
        vector = plgpu.load(scales, layout=plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False)
        zeros = jnp.zeros_like(vector)
        vector = jnp.where(jnp.broadcast_to(is_real, vector.shape), vector, zeros)
        return jax.lax.broadcast_in_dim(vector, shape, (axis,))

    if operands.channel_scales:
        columns = pl.ds(column, tiles.consumer_out)
        group = jnp.minimum(tile.group, context.groups - 1)
        products = tuple(
            product * broadcast(scales.at[group, columns], 0)
            for product, scales in zip(products, operands.channel_scales, strict=True)
        )
    if operands.row_scales is not None:
        rows = pl.ds(tile.block * BLOCK_ROWS, tiles.rows)
        scales = broadcast(operands.row_scales.at[rows], 1)
        products = tuple(product * scales for product in products)
    return products


def _store(context: Context, consumer: jax.Array, tile: Tile, column: jax.Array) -> None:
    """Copy the rows of an output tile that belong to its group, and no others.

    TMA copies have static sizes, and from a swizzled buffer they begin and end with its blocks: the
    rows of blocks that are shared with other tiles go one by one, through a buffer that is not
    swizzled.
    """
    tiles, output = context.tiles, context.output
    columns = pl.ds(column, tiles.consumer_out)
    buffers: Any = context.scratch
    source, edge = buffers.output.at[consumer], buffers.edge.at[consumer]
    whole_begin = jax.lax.div(tile.begin + BLOCK_ROWS - 1, BLOCK_ROWS)
    whole_end = jax.lax.div(tile.end, BLOCK_ROWS)

    def copy_blocks(block: Any, count: int) -> None:
        target = (tile.block + block) * BLOCK_ROWS
        plgpu.copy_smem_to_gmem(
            source.at[pl.ds(block * BLOCK_ROWS, count * BLOCK_ROWS)],
            output.at[pl.ds(target, count * BLOCK_ROWS), columns],
        )

    full = tile.end - tile.begin == tiles.store_rows

    @pl.when(full)
    def _full() -> None:
        copy_blocks(0, tiles.store_rows // BLOCK_ROWS)

    @pl.when(jnp.logical_not(full))
    def _partial() -> None:
        jax.lax.fori_loop(whole_begin, whole_end, lambda block, _: copy_blocks(block, 1), None)

    def copy_edge(block: jax.Array, begin: jax.Array, end: jax.Array) -> None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        rows = source.at[pl.ds(block * BLOCK_ROWS, BLOCK_ROWS)]
        edge[...] = plgpu.load(rows, layout=ROWS_LAYOUT, optimized=False)
        plgpu.commit_smem()
        first = (tile.block + block) * BLOCK_ROWS

        def copy_row(row: jax.Array, _: None) -> None:
            plgpu.copy_smem_to_gmem(
                edge.at[pl.ds(row, 1)], output.at[pl.ds(first + row, 1), columns]
            )

        jax.lax.fori_loop(begin, end, copy_row, None)

    @pl.when((tile.begin > 0) & (tile.begin < tile.end))
    def _head() -> None:
        copy_edge(jnp.int32(0), tile.begin, jnp.minimum(tile.end, BLOCK_ROWS))

    @pl.when((tile.end > whole_end * BLOCK_ROWS) & (whole_end >= whole_begin))
    def _tail() -> None:
        copy_edge(whole_end, jnp.int32(0), tile.end - whole_end * BLOCK_ROWS)
