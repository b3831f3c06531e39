"""What the Hopper kernels of all ops share. Imported by them only."""

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

SHARED_MEMORY = 232_448
"""Bytes that a block of threads may have."""


def store(target: Any, value: Any) -> None:
    """Write to a ref, in shared or global memory, whatever the layout of the value.

    Where the layout does not allow the fastest way, JAX wants to be told that this is known.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(target, value, optimized=False)
    else:  # JAX 0.11
        target[...] = value
