"""Loops and outputs of kernels inside `shard_map`, which has to know what differs among devices."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.typing import DTypeLike
from jaxtyping import Array


def vary_like(array: Array, others: tuple[Array, ...]) -> Array:
    """Inside `shard_map`, mark `array` as varying over every mesh axis over which the others vary.

    A loop requires its carry to have the same varying axes before and after.
    """
    axes = _axes(others)
    return jax.lax.pcast(array, tuple(axes), to="varying") if axes else array


def varying_shape(
    shape: tuple[int, ...], dtype: DTypeLike, inputs: Sequence[Any]
) -> jax.ShapeDtypeStruct:
    """Returns an output that, inside `shard_map`, differs along all mesh axes along which inputs
    do."""
    varying = jax.sharding.ManualAxisType(varying=_axes(inputs))
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)


def _axes(arrays: Sequence[Any]) -> frozenset[str]:
    return frozenset[str]().union(*(jax.typeof(array).manual_axis_type.varying for array in arrays))
