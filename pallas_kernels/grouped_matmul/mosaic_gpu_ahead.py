"""The Hopper kernel without a warpgroup that only loads: the first that multiplies does that, too.

Called by `mosaic_gpu_kernel.py`, for both kinds of consumers. Two warpgroups have 255 registers a
thread instead of 168, three have 168 instead of 128. Before a step the first of them starts to load
the one for which the buffers of an earlier step are free, some steps and often a tile ahead
(`Cursor`).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.grouped_matmul.mosaic_gpu_types import Context, Epilogue, Tile
from pallas_kernels.grouped_matmul.mosaic_gpu_walk import (
    Cursor,
    first_step,
    for_each_tile,
    load_next,
    release,
    wait_until_free,
)

LATE = 2
"""Steps that the other warpgroups may be behind before the one that loads waits for them."""

Carry = tuple[jax.Array, Cursor]
"""The step of the ring that is multiplied next, and what is loaded next."""

ComputeTile = Callable[[Context, Epilogue, jax.Array, Carry, Tile, jax.Array], Carry]


def load_and_compute(
    context: Context, epilogue: Epilogue, warpgroup: jax.Array, compute_tile: ComputeTile
) -> None:
    """What a warpgroup does: its part of all output tiles. All count the steps alike."""
    stages = context.tiles.stages
    mine = warpgroup == 0
    cursor = first_step(context)
    for stage in range(stages - LATE):
        cursor = load_next(context, cursor, stage, mine=mine)
    for stage in range(stages - LATE, stages):
        release(context, stage)
    end, _ = for_each_tile(
        context,
        (jnp.int32(0), cursor),
        lambda *arguments: compute_tile(context, epilogue, warpgroup, *arguments),
    )

    @pl.when(mine)
    def _drain() -> None:  # no arrival is left unseen
        for late in range(LATE):
            wait_until_free(context, context.stage_of(end + (stages - LATE + late)))


def refill(context: Context, warpgroup: jax.Array, step: jax.Array, cursor: Cursor) -> Cursor:
    """Load the next step into the buffers of the one that was `LATE` steps ago."""
    mine = warpgroup == 0
    stage = context.stage_of(step + (context.tiles.stages - LATE))
    pl.when(mine)(lambda: wait_until_free(context, stage))
    return load_next(context, cursor, stage, mine=mine)


# Registers suffice for one set of sums beside the totals. The compiler has to be held to that.


def now(step: jax.Array, compute: Callable[[], jax.Array], otherwise: jax.Array) -> Any:
    """What `compute` gives, computed here.

    Behind a branch of which the compiler does not know that it is always taken: else it adds the
    last sums while the next ones are computed, and both are in registers.
    """
    return jax.lax.cond(step >= 0, compute, lambda: otherwise)


def zero() -> jax.Array:
    """A zero that is used after sums began from zero.

    Without one, the last such use of the constant takes the register in which it lies since the
    beginning of the step for the sums, and with it all of their registers.
    """
    return jax.lax.optimization_barrier(jnp.float32(0))
