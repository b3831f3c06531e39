"""Products of all rows with one quantised weight: one group, whose size is known when compiled.

Called by the linear maps of a model, where `covers` says that a kernel is to do it. On a GPU those
are weights in blocks alone, which XLA multiplies block by block. Of others it converts FP8 as it
loads them, and divides a long d_in among the multiprocessors, which the kernel does not.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.grouped_matmul.api import grouped_matmul, grouped_swiglu
from pallas_kernels.quantize import QuantArray
from pallas_kernels.target import current_target


def covers(rows: Array, *weights: Array | QuantArray) -> bool:
    """Whether a kernel is to multiply these rows [rows, d_in] by these weights [d_out, d_in], which
    are in 8 bits: others are for XLA."""
    backend = current_target().backend
    if backend == "reference" or rows.ndim != 2:
        return False
    if backend == "mosaic_tpu":
        fits = rows.dtype in (jnp.bfloat16, jnp.float32)
        return fits and all(isinstance(array, QuantArray) for array in weights)
    from pallas_kernels.grouped_matmul import mosaic_gpu

    return all(
        isinstance(array, QuantArray)
        and 0 < array.block[1] < array.shape[1]
        and mosaic_gpu.covers(rows.dtype, _stack(array))
        for array in weights
    )


def dense_matmul(
    rows: Float[Array, "rows d_in"], weights: Float[Array, "d_out d_in"] | QuantArray
) -> Float[Array, "rows d_out"]:
    """Rows times one weight [d_out, d_in], as `grouped_matmul` of one group has it."""
    return grouped_matmul(rows, _stack(weights), _one_group(rows))


def dense_swiglu(
    rows: Float[Array, "rows d_model"],
    gate_weights: Float[Array, "d_ff d_model"] | QuantArray,
    up_weights: Float[Array, "d_ff d_model"] | QuantArray,
    down_weights: Float[Array, "d_out d_ff"] | QuantArray,
) -> Float[Array, "rows d_out"]:
    """The SwiGLU of weights [d_out, d_in], as `grouped_swiglu` of one group has it."""
    gate, up, down = map(_stack, (gate_weights, up_weights, down_weights))
    return grouped_swiglu(rows, gate, up, down, _one_group(rows))


def _one_group(rows: Array) -> np.ndarray:
    return np.asarray([rows.shape[0]], np.int32)


def _stack(weights: Array | QuantArray) -> Any:
    """As the weights of one group."""
    return jax.tree.map(lambda array: array[None], weights)
