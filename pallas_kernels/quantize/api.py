"""Quantising rows to 8 bits: checks the call, then runs the backend.

Called by whoever sends or stores rows in 8 bits. Knows nothing of what the rows are.
"""

from typing import Literal, get_args

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Num

from pallas_kernels.quantize import reference

Format = Literal["fp8", "int8"]


def quantize_rows(
    x: Float[Array, "tokens d"], format: Format
) -> tuple[Num[Array, "tokens d"], Float32[Array, " tokens"]]:
    """Quantise every row symmetrically, by its largest magnitude, so that `x ≈ values * scales`.

    "fp8" is float8_e4m3fn (largest value 448, saturating), "int8" uses -127..127 and rounds half to
    even. A row of zeros, or one so small that its scale would be below 2^-100 (8e-31), gives zeros
    and the scale 1. A NaN or an infinity makes NaN of its whole row, once it is dequantised.

    Raises:
      ValueError: x is not a float array of rank 2, or the format is unknown.
    """
    if x.ndim != 2 or 0 in x.shape[1:] or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x is {x.dtype}{x.shape}, needs floats [tokens, d] with d > 0")
    if format not in get_args(Format):
        raise ValueError(f"format is {format!r}, needs one of {get_args(Format)}")
    return reference.quantize_rows(x, format)


def dequantize_rows(
    values: Num[Array, "tokens d"], scales: Float32[Array, " tokens"], dtype: DTypeLike
) -> Float[Array, "tokens d"]:
    """Multiply every row by its scale, in FP32, and round to `dtype`; too large saturates.

    Raises:
      ValueError: the shapes or dtypes do not fit together.
    """
    if values.ndim != 2 or values.dtype not in (jnp.float8_e4m3fn, jnp.int8):
        raise ValueError(
            f"values is {values.dtype}{values.shape}, needs float8_e4m3fn or int8 [tokens, d]"
        )
    if scales.shape != values.shape[:1] or scales.dtype != jnp.float32:
        raise ValueError(
            f"scales is {scales.dtype}{scales.shape}, needs float32 ({values.shape[0]},)"
        )
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dtype is {dtype}, needs a float type")
    return reference.dequantize_rows(values, scales, dtype)
