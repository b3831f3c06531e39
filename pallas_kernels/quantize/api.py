"""Quantising to 8 bits: checks the call, then runs the backend.

Called by code that sends or stores rows, or holds weights, in 8 bits. Knows nothing of their use.
"""

from typing import Literal, get_args

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Num

from pallas_kernels.quantize import reference
from pallas_kernels.quantize.quant_array import Format, QuantArray, check_quant_array

WeightFormat = Literal["fp8", "fp8_block", "int8", "int4", "mxfp4"]

BLOCKS: dict[WeightFormat, tuple[int, int]] = {
    "fp8": (1, 0),
    "fp8_block": (128, 128),
    "int8": (1, 0),
    "int4": (1, 128),
    "mxfp4": (1, 32),
}
"""Weights [d_out, d_in] that share a scale: a row, DeepSeek's blocks, or a group of a row."""


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


def quantize_weight(
    w: Float[Array, "*batch d_out d_in"],
    format: WeightFormat,
    block: tuple[int, int] | None = None,
) -> QuantArray:
    """Quantise a weight (or a stack) symmetrically, by the largest magnitude of every block.

    "fp8" and "int8" have one scale an output channel, "fp8_block" one for 128 x 128 weights, "int4"
    (-7..7) one for 128 of d_in, "mxfp4" (float4_e2m1fn) a power of two for 32 of d_in; the last
    block of an axis may be smaller. Rounding, saturation, and values that are too small or not
    finite are as in `quantize_rows`: a block of zeros gets the scale 1. Numbers of a dequantised
    MXFP4 weight are kept exactly. Being plain array code, under `jax.jit` it quantises sharded
    arrays as a whole, whatever the sharding.

    Args:
      w: floats.
      format: of the values.
      block: other sizes (block_out, block_in) than the format's own; 0 is the whole axis.

    Raises:
      ValueError: w is not a float array of rank 2 or more, the format is unknown, or block is not
        two sizes.
    """
    if w.ndim < 2 or 0 in w.shape[-2:] or not jnp.issubdtype(w.dtype, jnp.floating):
        raise ValueError(f"w is {w.dtype}{w.shape}, needs floats [..., d_out, d_in], both > 0")
    if format not in BLOCKS:
        raise ValueError(f"format is {format!r}, needs one of {tuple(BLOCKS)}")
    block = BLOCKS[format] if block is None else block
    if len(block) != 2 or min(block) < 0:
        raise ValueError(f"block is {block}, needs two sizes of at least 0")
    return reference.quantize_weight(w, "fp8" if format == "fp8_block" else format, block)


def dequantize_weight(w: QuantArray, dtype: DTypeLike) -> Float[Array, "*batch d_out d_in"]:
    """Multiply every block by its scale, in FP32, and round to `dtype`; too large saturates.

    Raises:
      ValueError: w's parts do not fit together, or dtype is no float type.
    """
    check_quant_array("w", w)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"dtype is {dtype}, needs a float type")
    return reference.dequantize_weight(w, dtype)
