"""Loops inside `shard_map` in plain `jax.numpy`."""

import jax
from jaxtyping import Array


def vary_like(array: Array, others: tuple[Array, ...]) -> Array:
    """Inside `shard_map`, mark `array` as varying over every mesh axis over which the others vary.

    A loop requires its carry to have the same varying axes before and after.
    """
    axes = frozenset[str]().union(*(jax.typeof(other).manual_axis_type.varying for other in others))
    return jax.lax.pcast(array, tuple(axes), to="varying") if axes else array
