"""What the Hopper kernels of all ops share. Imported by them only."""

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

SHARED_MEMORY = 232_448
"""Bytes that a block of threads may have."""

ROWS_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((8, 64), (2, 64), (4,))),
    warp_dims=(-5,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)
"""How a warpgroup holds 8 rows: 2 of them a warp, 4 of 64 columns a thread."""


def store(target: Any, value: Any) -> None:
    """Write to a ref, in shared or global memory, whatever the layout of the value.

    Where the layout does not allow the fastest way, JAX wants to be told that this is known.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(target, value, optimized=False)
    else:  # JAX 0.11
        target[...] = value
