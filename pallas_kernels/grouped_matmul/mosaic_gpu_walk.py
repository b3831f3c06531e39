"""The order in which the CTAs of the Hopper kernel process tiles, and how operands are loaded.

Called by both kinds of consumers. At any time the CTAs work on neighbouring tiles. The two blocks
of a cluster share one place in the order, and each takes half of its tile. Row tiles vary fastest,
within a band of `tiles.band`, then output tiles, then bands, so that a band's weights and rows are
reused from the L2 cache. Padding rows come last.

A kernel without a warpgroup that only loads (`load_and_compute`) has more registers: two warpgroups
have 255 a thread instead of 168, three have 168 instead of 128. Before each step the first
warpgroup starts to load a later one, for which buffers are free. That is some steps and often a
tile ahead (`Cursor`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.mosaic_gpu_types import (
    CLUSTER,
    CLUSTER_AXIS,
    Context,
    Epilogue,
    Ref,
    Tile,
)
from pallas_kernels.grouped_matmul.tile_list import BLOCK_ROWS

LATE = 2
"""Steps that other warpgroups may lag behind before the one that loads waits for them."""


def for_each_tile(context: Context, start: Any, body: Callable[..., Any]) -> Any:
    """Runs `carry = body(carry, tile, output tile)`, from `start` on, for the tiles of this CTA.

    The blocks of a cluster take the same number of steps.
    """
    total = context.all_tiles * context.out_tiles
    processor, processors = jax.lax.axis_index("processor"), jax.lax.axis_size("processor")

    def run(round_: jax.Array, carry: Any) -> Any:
        return body(carry, *_tile_at(context, round_ * processors + processor))

    # A block of a cluster that took one step less would leave the other one waiting for its half of
    # an operand, or for its release of a stage. So `processor` counts clusters, and halves without
    # rows are walked, too.
    rounds = jax.lax.div(total - processor + processors - 1, processors)
    return jax.lax.fori_loop(0, rounds, run, start)


def _tile_at(context: Context, place: jax.Array) -> tuple[Tile, jax.Array]:
    """Returns row tile and output tile at a place of the order; past the end, the last row tile."""
    band, out_tiles = context.tiles.band, context.out_tiles
    of_groups, total = context.group_tiles, context.all_tiles
    band_index = jax.lax.div(place, band * out_tiles)
    inside = place - band_index * (band * out_tiles)
    # The range is hidden from the compiler: for operands known to fit 16 bits it emits the division
    # as a function call, and around calls it serialises wgmma.
    height = jax.lax.optimization_barrier(jnp.clip(of_groups - band_index * band, 1, band))
    column = jax.lax.div(inside, height)
    row = band_index * band + inside - column * height
    padding = place - of_groups * out_tiles
    out_tile = jnp.where(padding < 0, column, jax.lax.rem(padding, out_tiles))
    row_tile = jnp.where(padding < 0, row, of_groups + jax.lax.div(padding, out_tiles))
    row_tile = jnp.maximum(jnp.minimum(row_tile, total - 1), 0)
    split = jnp.int32(0)
    if context.tiles.splits > 1:
        columns = out_tiles // context.tiles.splits
        split = jax.lax.div(out_tile, columns)
        out_tile -= split * columns
    group, block, begin, end = (context.tile_list.tiles[field, row_tile] for field in range(4))
    tile = Tile(group, block, begin, end, split)
    return _of_block(context, tile, out_tile)


def _of_block(context: Context, tile: Tile, out_tile: jax.Array) -> tuple[Tile, jax.Array]:
    """Returns this block's half of a cluster's tile: half of the rows, or of the columns."""
    tiles = context.tiles
    if tiles.shared == "weights":
        first_block = jax.lax.axis_index(CLUSTER_AXIS) * (tiles.rows // BLOCK_ROWS)
        return tile.part(first_block, tiles.rows), out_tile
    if tiles.shared == "rows":
        return tile, out_tile * CLUSTER + jax.lax.axis_index(CLUSTER_AXIS)
    return tile, out_tile


class Cursor(NamedTuple):
    """The step that is loaded next, ahead of the one that is multiplied.

    Attributes:
      place: place of its tile in the order of all tiles.
      inner: the step within the tile.
      group, block: group and first block of rows of the tile.
      out_tile: the output tile.
      exists: False past the last tile with products.
    """

    place: jax.Array
    inner: jax.Array
    group: jax.Array
    block: jax.Array
    out_tile: jax.Array
    exists: jax.Array


def _begin_tile(context: Context, place: jax.Array) -> Cursor:
    tile, out_tile = _tile_at(context, place)
    exists = place < context.group_tiles * context.out_tiles
    return Cursor(place, jnp.int32(0), tile.group, tile.block, out_tile, exists)


def load_next(context: Context, cursor: Cursor, stage: Any, *, mine: Any) -> Cursor:
    """Starts to load the cursor's step, if it exists and is `mine`; returns the next cursor."""

    @pl.when(mine & cursor.exists)
    def _load() -> None:
        load_step(context, cursor.group, cursor.block, cursor.out_tile, cursor.inner, stage)

    return jax.lax.cond(
        cursor.inner + 1 < context.inner_steps,
        lambda: cursor._replace(inner=cursor.inner + 1),
        lambda: _begin_tile(context, cursor.place + jax.lax.axis_size("processor")),
    )


def load_step(
    context: Context,
    group: jax.Array,
    block: jax.Array,
    out_tile: jax.Array,
    index: jax.Array,
    stage: Any,
) -> None:
    """Starts to load the operands of one step into the buffers of a stage. Each block of a cluster
    loads half of the shared operand, into the buffers of both blocks."""
    tiles, scratch, operands = context.tiles, context.scratch, context.operands
    full = scratch.full.at[stage]
    inner = pl.ds(index * tiles.inner, tiles.inner)
    columns = pl.ds(out_tile * tiles.out, tiles.out)

    # A shared operand counts once in `full`: this block announces all of its bytes, of which the
    # copies of both blocks bring one half each.
    def copy(source: Ref, target: Ref, name: str) -> None:
        axes = CLUSTER_AXIS if tiles.shared == name else None
        plgpu.copy_gmem_to_smem(source, target.at[stage], full, collective_axes=axes)

    for source, target in zip(operands.weights, scratch.weights, strict=True):
        copy(source.at[group, columns, inner], target, "weights")
    rows = pl.ds(block * BLOCK_ROWS, tiles.rows)
    copy(operands.rows.at[rows, inner], scratch.rows, "rows")
    if operands.row_block_scales is not None:
        of_rows = pl.ds(block * BLOCK_ROWS, tiles.scale_rows)
        copy(operands.row_block_scales.at[index, of_rows], scratch.scales, "scales")


def wait_until_free(context: Context, stage: Any) -> None:
    """Waits until all consumers, of both blocks of a cluster, are done with a stage's buffers."""
    plgpu.barrier_wait(context.scratch.empty.at[stage])


def wait_until_loaded(context: Context, stage: Any) -> None:
    """Waits until the copies into the buffers of a stage have arrived."""
    plgpu.barrier_wait(context.scratch.full.at[stage])


def release(context: Context, stage: Any) -> None:
    """Gives the buffers of a stage back to the warpgroups that load, in both blocks."""
    # Callers have waited for the products: until then wgmma reads the buffers, and the next copy,
    # in a cluster also one of the other block, would overwrite its operands.
    if context.scratch.scales is not None:
        plgpu.commit_smem()  # every thread has loaded its scales, and TMA may know
    plgpu.barrier_arrive(context.scratch.empty.at[stage])


Carry = tuple[jax.Array, Cursor]
"""Step of the ring that is multiplied next, and the step that is loaded next."""

ComputeTile = Callable[[Context, Epilogue, jax.Array, Carry, Tile, jax.Array], Carry]


def load_and_compute(
    context: Context, epilogue: Epilogue, warpgroup: jax.Array, compute_tile: ComputeTile
) -> None:
    """Runs one warpgroup: its part of all output tiles. All warpgroups count the steps alike."""
    stages = context.tiles.stages
    mine = warpgroup == 0
    cursor = _begin_tile(context, jax.lax.axis_index("processor"))
    for stage in range(stages - LATE):
        cursor = load_next(context, cursor, stage, mine=mine)
    # The first `LATE` refills find free buffers. All warpgroups release these as if they had used
    # them, since `refill` waits before every load and counts one release a wait.
    for stage in range(stages - LATE, stages):
        release(context, stage)
    end, _ = for_each_tile(
        context,
        (jnp.int32(0), cursor),
        lambda *arguments: compute_tile(context, epilogue, warpgroup, *arguments),
    )

    @pl.when(mine)
    # The last `LATE` releases. A block that ended before them would leave the other block of its
    # cluster to arrive at a barrier in shared memory that no longer exists.
    def _drain() -> None:  # no arrival is left unseen
        for late in range(LATE):
            wait_until_free(context, context.stage_of(end + (stages - LATE + late)))


def refill(context: Context, warpgroup: jax.Array, step: jax.Array, cursor: Cursor) -> Cursor:
    """Loads the next step into the buffers of the step `LATE` steps ago."""
    mine = warpgroup == 0
    # Waiting for the step just multiplied would stop this warpgroup until the slowest is done with
    # it. `LATE` steps back, the others have usually released the buffers already.
    stage = context.stage_of(step + (context.tiles.stages - LATE))
    pl.when(mine)(lambda: wait_until_free(context, stage))
    return load_next(context, cursor, stage, mine=mine)


# Registers suffice for one set of sums beside the totals. These two hold the compiler to that.


def now(step: jax.Array, compute: Callable[[], jax.Array], otherwise: jax.Array) -> Any:
    """Returns `compute()`, evaluated at this point of the program.

    It stands behind a branch that is always taken, which the compiler cannot know. Otherwise it
    adds the last sums while the next ones are computed, and both occupy registers.
    """
    return jax.lax.cond(step >= 0, compute, lambda: otherwise)


def zero() -> jax.Array:
    """Returns a zero that stays in use after sums began from zero.

    Without it, the last use of the constant hands the register that has held it since the beginning
    of the step to the sums, and with it all of their registers.
    """
    return jax.lax.optimization_barrier(jnp.float32(0))
