"""Accumulators of the Hopper kernel: initialisation, scaling, and the store to memory, quantised or
not.

Called by both kinds of consumers. A row of a tile that is quantised gets one scale. Where weights
are first, its columns are spread over all consumers, and over all warps of each. So the tile goes
through shared memory in FP32: afterwards every consumer has whole rows, and a warp has two of them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.mosaic_gpu_types import (
    ROWS_LAYOUT,
    Context,
    Narrowing,
    Ref,
    Tile,
)
from pallas_kernels.grouped_matmul.tile_list import BLOCK_ROWS
from pallas_kernels.mosaic_gpu import load, quantise, store


def accumulator(context: Context, shape: tuple[int, int]) -> Any:
    """Returns the type of an accumulator for sums of products that begin from zero."""
    is_int8 = context.operands.rows.dtype == jnp.int8
    return plgpu.ACC(shape, jnp.int32 if is_int8 else jnp.float32)


def block_scales(
    context: Context, tile: Tile, column: jax.Array, index: jax.Array
) -> list[jax.Array | None]:
    """Returns for each weight the scale of a column's block in a step; None without such scales."""
    operands = context.operands
    if not operands.block_scales:
        return [None] * len(operands.weights)
    block_out, block_in = operands.block
    # A tile may have more columns than the weights.
    last = operands.block_scales[0].shape[1] - 1
    column_block = jnp.minimum(jax.lax.div(column, block_out), last)
    block = jax.lax.div(index * context.tiles.inner, block_in)
    return [scales[tile.group, column_block, block] for scales in operands.block_scales]


def scaled_by_channel(
    context: Context,
    products: tuple[jax.Array, ...],
    tile: Tile,
    column: jax.Array,
    shape: tuple[int, int],
    axis: int,
) -> tuple[jax.Array, ...]:
    """Multiplies the products with each weight by the scales, if any, of the channels from `column`
    on, which lie along one axis of a product."""
    if not context.operands.channel_scales:
        return products
    channels = pl.ds(column, shape[axis])

    def scales(number: int) -> jax.Array:
        group = jnp.minimum(tile.group, context.groups - 1)
        of_channels = context.operands.channel_scales[number].at[group, channels]
        return spread(context, of_channels, tile, shape, axis)

    return tuple(product * scales(number) for number, product in enumerate(products))


def spread(
    context: Context, scales: Ref, tile: Tile, shape: tuple[int, int], axis: int
) -> jax.Array:
    """Spreads scales along one axis of a product, as wgmma spreads it over the threads.

    Scales of padding rows may be anything, NaN included.
    """
    vector = load(scales, plgpu.Layout.WGMMA.reduce(1 - axis))
    is_real = jnp.broadcast_to(tile.group < context.groups, vector.shape)
    vector = jnp.where(is_real, vector, jnp.zeros_like(vector))
    return jax.lax.broadcast_in_dim(vector, shape, (axis,))


def store_rows(context: Context, consumer: jax.Array, tile: Tile, column: jax.Array) -> None:
    """Copies the rows in a consumer's buffer that belong to the group, and no others.

    TMA copies have static sizes, and from a swizzled buffer they begin and end with its blocks: the
    rows of blocks that are shared with other tiles go one by one, through a buffer that is not
    swizzled.
    """
    tiles, output = context.tiles, context.output
    columns = pl.ds(column, tiles.store_columns)
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
        # Head and tail take turns with one buffer, which TMA may still be reading for the other.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        edge[...] = load(source.at[pl.ds(block * BLOCK_ROWS, BLOCK_ROWS)], ROWS_LAYOUT)
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
    # Each consumer has stored its columns of every row. The rows that it quantises now have columns
    # of all consumers.
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
    # The warpgroup that loads takes no part: it runs ahead, and would stop loading here.
    met: Any = buffers.met
    plgpu.barrier_arrive(met)
    plgpu.barrier_wait(met)


def _quantise(buffers: Narrowing, rows: Any) -> None:
    """Quantises a few whole rows."""
    wide: Any = buffers.wide
    _keep(buffers, rows, load(wide.at[rows], ROWS_LAYOUT))


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
    # No meeting: a row lies in one warpgroup, which alone fills and copies its part of the buffers.
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
        scales = load(buffers.scales.at[pl.ds(row, BLOCK_ROWS)], ROWS_LAYOUT.reduce(1))
        store(output_scales.at[out_tile, pl.ds(first + row, BLOCK_ROWS)], scales)

    def copy_row(row: jax.Array, _: None) -> None:
        copy_rows(row, 1)
        output_scales[out_tile, first + row] = buffers.scales[row]

    jax.lax.cond(
        end - begin == BLOCK_ROWS,
        copy_block,
        lambda: jax.lax.fori_loop(begin, jnp.maximum(begin, end), copy_row, None),
    )
