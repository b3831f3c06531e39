"""The product of activations and a weight in any of its formats.

Called by the linear maps of both roles, which need not know a weight's format. The values of an
8-bit format and the order of summation are defined in `pallas_kernels/quantize/product.py`; the
choice between a kernel and XLA is made in `pallas_kernels/grouped_matmul/dense.py`. This module
checks shapes and dtypes.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels.grouped_matmul.dense import dense_matmul
from pallas_kernels.input_major import InputMajor
from pallas_kernels.quantize import QuantArray, check_quant_array


def matmul(
    x: Float[Array, "*batch tokens d_in"],
    w: Float[Array, "*batch d_out d_in"] | QuantArray | InputMajor,
) -> Float32[Array, "*batch tokens d_out"]:
    """x · wᵀ in FP32, accumulated in FP32 (INT8: in int32), for the caller to round. Results of
    kernels are rounded to x's dtype already.

    Formats of w:
      a float array of x's dtype; FP32 inputs have FP32 products on every platform.
      floats that lie input by input: of any dtype; products and sums are FP32.
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
