"""Products of all rows with one weight, by XLA or by the kernels of grouped products.

Called by the linear maps of a model. A kernel sees one group of a size known at compile time.
Kernels are used for 8-bit weights only. XLA on TPUs converts FP8 more slowly than HBM delivers it,
and on every platform it processes blocks of 128 columns one by one. For 128 rows times Step-3's
output projection on v7x XLA takes 1.3 times as long as memory for FP8 and over 12 times for FP8
blocks by static counts, the kernel 0.6 and 0.9.

On a GPU kernels are used for block scales only, which XLA multiplies in 127 rounds of six launches.
Where d_out is narrow they split d_in over the multiprocessors, and XLA adds up the parts. FP8
weights multiply rows in FP8, at twice the rate of 16 bits: rows with a scale for every 128 columns
where weights have blocks, as DeepSeek-V3's format says, and with one scale for weights with scales
of channels, which XLA multiplies as both are. Quantising the rows takes a launch, which few rows
do not gain back (docs/measurements/kernels.md, an H100). They are quantised all the same: a token
must not depend on how many others are in its batch. Rows that came in FP8 are multiplied as they
came. INT8 weights multiply rows in INT8.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from pallas_kernels.activation import SWIGLU, Activation
from pallas_kernels.coverage import Fallback, fall_back
from pallas_kernels.grouped_matmul.api import fastest_row_format, grouped_matmul, grouped_swiglu
from pallas_kernels.grouped_matmul.reference import WeightArray
from pallas_kernels.grouped_matmul.reference import gated as gated_product
from pallas_kernels.input_major import InputMajor
from pallas_kernels.input_major import product as input_major_product
from pallas_kernels.norm_quantize import rms_norm, rms_norm_quantize
from pallas_kernels.quantize import (
    QuantArray,
    StackEntry,
    check_quant_array,
    from_bits,
)
from pallas_kernels.quantize.product import (
    product_of_rows,
    quant_product,
    quant_product_of_floats,
)
from pallas_kernels.target import EVERY_KERNEL, current_target, kernels

FP8 = jnp.dtype(jnp.float8_e4m3fn)
TILE = 64, 128
"""Rows and hidden columns of a tile of `swiglu_steps_of_fp8`, as `pick_tiles` may choose them."""
MOST_TILES = 124
"""Most tiles of the first step of `swiglu_steps_of_fp8`: the multiprocessors of a Hopper GPU that
are not left to collectives. Two rounds, or half the tiles with twice the rows, take 1.6 times as
long for half of Step-3's shared expert."""

Network = tuple[WeightArray, WeightArray, WeightArray]
"""Weights of a SwiGLU network: gate and up [d_ff, d_model], and down [d_out, d_ff]."""

_COST = "converts the weights, and multiplies one block of columns after the other"


def covers(rows: Array, *weights: WeightArray) -> bool:
    """Whether a kernel, rather than XLA, should multiply rows [rows, d_in] by 8-bit weights
    [d_out, d_in]."""
    target = current_target()
    if target.backend not in EVERY_KERNEL or rows.ndim > 2:
        return False
    of_target = _on_tpu if target.backend == "mosaic_tpu" else _on_gpu
    return all(isinstance(array, QuantArray) and of_target(rows, array) for array in weights)


def _on_tpu(rows: Array, weights: QuantArray) -> bool:
    """Whether a kernel multiplies on a TPU. TPUs store matrices whose width is no multiple of 128
    transposed, so that a kernel would need a copy first."""
    fits = rows.dtype in (jnp.bfloat16, jnp.float32)
    if not fits or not (weights.shape[1] % 128 == 0 or _in_blocks(weights)):
        return False
    target = current_target()
    return not _said(kernels("grouped_matmul", target, "_plan").gap(weights.shape[:1], target))


def _on_gpu(rows: Array, weights: QuantArray) -> bool:
    if not _in_blocks(weights):
        return False
    kernel = kernels("grouped_matmul", current_target())
    return not _said(kernel.gap(rows.dtype, (_stack(weights)[0],)))


def _said(reason: str) -> str:
    """Returns the reason why no kernel runs; reports it as a fallback unless it is empty."""
    if reason:
        fall_back(Fallback("dense_matmul", current_target().device_kind, reason, _COST))
    return reason


def _in_blocks(weights: QuantArray) -> bool:
    return 0 < weights.block[1] < weights.shape[1]


def matmul(
    x: Float[Array, "*batch tokens d_in"],
    w: Float[Array, "*batch d_out d_in"] | QuantArray | InputMajor,
) -> Float32[Array, "*batch tokens d_out"]:
    """Returns x · wᵀ in FP32, accumulated in FP32 (INT8: in int32), for the caller to round.
    Results of kernels are already rounded to x's dtype.

    Formats of w:
      a float array of x's dtype; FP32 inputs have FP32 products on every platform.
      floats that lie input by input (`InputMajor`), of any dtype; products and sums are FP32.
      FP8 (`quantize_weight`'s "fp8", "fp8_block", or any block): x is not quantised; its products
        with the e4m3 values are summed over each block's columns, scaled, and accumulated.
      INT8: every token of x is quantised to INT8 over this device's d_in; products are summed in
        int32 and multiplied by `x_scale * w_scale`.

    Leading axes (heads, experts) are batch axes, equal in x and w.

    Raises:
      ValueError: the shapes or dtypes do not fit together.
    """
    if isinstance(w, QuantArray):
        check_quant_array("w", w)
    if x.ndim < 2 or w.ndim != x.ndim or x.shape[:-2] != w.shape[:-2] or x.shape[-1] != w.shape[-1]:
        raise ValueError(
            f"x {x.shape} times w {w.shape}: needs [..., tokens, d_in] and [..., d_out, d_in] with "
            "the same d_in and the same leading axes"
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x is {x.dtype}, needs floats")
    if not isinstance(w, QuantArray | InputMajor) and w.dtype != x.dtype:
        raise ValueError(f"x is {x.dtype}, w is {w.dtype}")
    return dense_matmul(x, w)


def dense_matmul(
    rows: Float[Array, "*batch rows d_in"],
    weights: Float[Array, "*batch d_out d_in"] | QuantArray | InputMajor,
    narrow: QuantArray | None = None,
) -> Float32[Array, "*batch rows d_out"]:
    """Multiplies rows by one weight, by a kernel or XLA; the caller has checked shapes and dtypes.
    Leading axes are batch axes, equal in both operands; with these XLA always multiplies.

    Args:
      narrow: see `grouped_swiglu`; only kernels use it.

    Returns:
      FP32; kernels round results to the dtype of `rows`. FP32 rows have FP32 products. On a Hopper
      GPU rows of 16 bits are quantised for FP8 weights.
    """
    if isinstance(weights, InputMajor):
        return input_major_product(rows, weights)
    if rows.shape[-2] == 1 and current_target().device_kind == "cpu":
        # XLA:CPU sums a single row in another order than several, and a token's result must not
        # depend on the other rows of its batch.
        two = jnp.pad(rows, ((0, 0),) * (rows.ndim - 2) + ((0, 1), (0, 0)))
        return dense_matmul(two, weights)[..., :1, :]
    if covers(rows, weights):
        group, (stack, first) = _one_group(rows), _stack(weights)
        found = grouped_matmul(
            rows,
            stack,
            group,
            row_format=fastest_row_format(rows, (stack,)),
            narrow=narrow,
            first=first,
        )
        return found.astype(jnp.float32)
    if isinstance(weights, QuantArray):
        weights = _alone(weights)
    if isinstance(weights, QuantArray) and _multiplies_fp8(rows, weights):
        _, values, scales = rms_norm_quantize(rows, None, 0.0, "fp8")
        return quant_product_of_floats(values, weights) * scales[:, None]
    if isinstance(weights, QuantArray):
        product = quant_product
        for _ in rows.shape[:-2]:
            product = jax.vmap(product)
        return product(rows, weights)
    precision = jax.lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None
    return product_of_rows(rows, weights, precision=precision)


def normed_matmul(
    rows: Float[Array, "rows columns"],
    norm: tuple[Float[Array, " d_in"], float],
    weights: Float[Array, "d_out d_in"] | QuantArray | InputMajor,
) -> Float32[Array, "rows d_out"]:
    """Returns the product of the RMSNorm of the rows' first d_in columns, by its weight and
    epsilon, with one weight. Where FP8 is multiplied, one kernel norms and quantises."""
    factors, epsilon = norm
    if isinstance(weights, QuantArray) and _multiplies_fp8(rows, weights := _alone(weights)):
        _, values, scales = rms_norm_quantize(rows, factors, epsilon, "fp8")
        return quant_product_of_floats(values, weights) * scales[:, None]
    return dense_matmul(rms_norm(rows[:, : factors.shape[0]], factors, epsilon), weights)


def dense_swiglu(
    rows: Float[Array, "rows d_model"],
    weights: Network,
    narrow: QuantArray | None = None,
    activation: Activation = SWIGLU,
) -> Float[Array, "rows d_out"]:
    """Computes `(silu(x Wgᵀ) * (x Wuᵀ)) Wdᵀ` by a kernel or by XLA; hidden rows and results are
    rounded to the dtype of `rows`.

    Args:
      narrow: `rows` in 8 bits with one scale a row, if the caller received them so. For kernels see
        `grouped_swiglu`. On a GPU XLA multiplies these values, and then the sums by the scales: it
        reads 8 bits, and 16-bit rows are never written. It multiplies FP8 by FP8 at twice the rate
        of 16 bits; the products are the same.
      activation: see `grouped_swiglu`.
    """
    value: Any = rows, narrow
    for step in swiglu_steps(rows, weights, activation):
        value = step(value)
    return value


def swiglu_steps(
    rows: Float[Array, "rows d_model"],
    weights: Network,
    activation: Activation = SWIGLU,
) -> tuple[Callable[[Any], Any], ...]:
    """Returns `dense_swiglu` of rows like these as steps, for a caller that does something else
    beside each step. The first step takes (rows, narrow), each other one the previous result, a
    tree of arrays; the last returns the output. A kernel computes everything in one step."""
    if covers(rows, *weights) and activation == SWIGLU:
        stacks, (first, *_) = zip(*map(_stack, weights), strict=True)
        row_format = fastest_row_format(rows, stacks)
        return (
            lambda given: grouped_swiglu(
                *(given[0], *stacks, _one_group(given[0])),
                row_format=row_format,
                narrow=given[1],
                first=first,
            ),
        )

    def gated(given: Any) -> Any:
        return given, _dense_product(given[0], weights[0], given[1])

    def hidden(found: Any) -> Array:
        (rows, narrow), gate = found
        up = _dense_product(rows, weights[1], narrow)
        return gated_product(gate, up, activation).astype(rows.dtype)

    def project(hidden: Array) -> Array:
        return dense_matmul(hidden, weights[2]).astype(hidden.dtype)

    return gated, hidden, project


def swiglu_steps_of_fp8(
    rows: Float[Array, "rows d_model"],
    narrow: QuantArray,
    weights: Network,
) -> tuple[Callable[[QuantArray], Any], Callable[[Any], Array]] | None:
    """Returns `swiglu_steps` as two launches of the kernel, for one network with FP8 weights. Both
    products multiply FP8 by FP8; hidden rows between them are in FP8 blocks.

    Args:
      rows: an array of the shape and dtype of the results.
      narrow: an argument of the first step: `rows` as received, with one scale a row; its values
        may be the first columns of a wider array.

    Returns:
      None if rows or weights are not in FP8, no such kernel covers them, or they take more than
        `MOST_TILES` tiles.
    """
    target, values = current_target(), from_bits(narrow.values)
    stacks = gate, up, down = tuple(_stack(array)[0] for array in weights)
    if values.dtype != jnp.float8_e4m3fn or fastest_row_format(rows, stacks) != "fp8":
        return None
    kernel = kernels("grouped_matmul", target)
    tiles = -(-rows.shape[0] // TILE[0]) * -(-gate.shape[1] // TILE[1])
    if not 0 < tiles <= MOST_TILES or rows.shape[0] % kernel.BLOCK_ROWS:
        return None
    first, second, dtype = kernel.hidden_in_blocks, kernel.down_of_blocks, rows.dtype
    return (
        functools.partial(first, gate_weights=gate, up_weights=up, target=target),
        functools.partial(second, down_weights=down, out_dtype=dtype, target=target),
    )


def _dense_product(
    rows: Float[Array, "rows d_in"],
    weights: Float[Array, "d_out d_in"] | QuantArray | InputMajor,
    narrow: QuantArray | None = None,
) -> Float32[Array, "rows d_out"]:
    """Returns `dense_matmul` of rows that may have been received in 8 bits."""
    if narrow is None or not _takes_narrow(rows, weights):
        return dense_matmul(rows, weights, narrow)
    if covers(rows, weights):
        return dense_matmul(rows, weights, narrow)
    values = from_bits(narrow.values)
    if (
        weights.dtype == values.dtype
        and isinstance(weights, QuantArray)
        and not _in_blocks(weights)
    ):
        return quant_product_of_floats(values, weights) * narrow.scales
    return dense_matmul(values.astype(rows.dtype), weights) * narrow.scales  # 16 bits have each


def _takes_narrow(rows: Array, weights: WeightArray) -> bool:
    """Whether multiplying the 8-bit values gives the products of the 16-bit rows. INT8 weights are
    excluded: they quantise rows themselves."""
    is_gpu, wide = current_target().backend == "mosaic_gpu", rows.dtype.itemsize == 2
    return is_gpu and wide and weights.dtype != jnp.int8


def _multiplies_fp8(rows: Array, weights: QuantArray) -> bool:
    """Whether a GPU multiplies these rows in FP8, with one scale for each."""
    fits = rows.ndim == 2 and rows.dtype.itemsize == 2 and from_bits(weights.values).dtype == FP8
    return fits and not _in_blocks(weights) and current_target().backend == "mosaic_gpu"


def _one_group(rows: Array) -> np.ndarray:
    return np.asarray([rows.shape[0]], np.int32)


def _stack(weights: Any) -> tuple[Any, Array | None]:
    """Returns the stack that contains a weight and the weight's index in it. A weight outside any
    stack gives a stack of one, and None."""
    if not _in_stack(weights):
        return jax.tree.map(lambda array: array[None], weights), None
    whole = _of_entries(weights, lambda part: part.of_shape(part.stack))
    return whole, weights.values.entry


def _alone(weights: QuantArray) -> QuantArray:
    """Returns a weight that is in a stack as arrays of its own, which XLA slices."""
    if not _in_stack(weights):
        return weights
    return _of_entries(weights, lambda part: part.of_shape(part.stack[part.entry]))


def _in_stack(weights: Any) -> bool:
    return isinstance(weights, QuantArray) and isinstance(weights.values, StackEntry)


def _of_entries(weights: QuantArray, take: Callable[[StackEntry], Array]) -> QuantArray:
    found: QuantArray = jax.tree.map(take, weights, is_leaf=lambda x: isinstance(x, StackEntry))
    return found
