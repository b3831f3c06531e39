"""The Hopper kernel without a warpgroup that only loads: the first one that multiplies also loads.

Called by `mosaic_gpu_kernel.py`, for both kinds of consumers. Two warpgroups have 255 registers a
thread instead of 168, three have 168 instead of 128. Before each step the first warpgroup starts to
load a later step, for which buffers are free; that is some steps and often a tile ahead (`Cursor`).
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
"""Steps that other warpgroups may lag behind before the one that loads waits for them."""

Carry = tuple[jax.Array, Cursor]
"""Step of the ring that is multiplied next, and the step that is loaded next."""

ComputeTile = Callable[[Context, Epilogue, jax.Array, Carry, Tile, jax.Array], Carry]


def load_and_compute(
    context: Context, epilogue: Epilogue, warpgroup: jax.Array, compute_tile: ComputeTile
) -> None:
    """Runs one warpgroup: its part of all output tiles. All warpgroups count the steps alike."""
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
    """Loads the next step into the buffers of the step `LATE` steps ago."""
    mine = warpgroup == 0
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
