"""The accumulators of the Hopper kernel: initialisation, scaling, and the store to memory.

Called by both kinds of consumers.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.mosaic_gpu_types import ROWS_LAYOUT, Context, Ref, Tile
from pallas_kernels.grouped_matmul.tile_list import BLOCK_ROWS


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
    vector = plgpu.load(scales, layout=plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False)
    is_real = jnp.broadcast_to(tile.group < context.groups, vector.shape)
    vector = jnp.where(is_real, vector, jnp.zeros_like(vector))
    return jax.lax.broadcast_in_dim(vector, shape, (axis,))


def store(context: Context, consumer: jax.Array, tile: Tile, column: jax.Array) -> None:
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
