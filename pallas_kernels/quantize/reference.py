"""Definition of quantisation in plain `jax.numpy`; runs on devices without a kernel (CPU).

Called by `api.py`, which has checked the arguments, and by the tests of the kernels. Shares no code
with any kernel.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Num

from pallas_kernels.quantize.bits import from_bits
from pallas_kernels.quantize.quant_array import E8M0, QuantArray

LARGEST = {"fp8": 448.0, "int8": 127.0, "int4": 7.0, "mxfp4": 6.0}
Format = Literal["fp8", "int8", "int4", "mxfp4"]
SMALLEST_SCALE = 2.0**-100


def quantize_rows(
    x: Float[Array, "tokens d"], format: Literal["fp8", "int8"]
) -> tuple[Num[Array, "tokens d"], Float32[Array, " tokens"]]:
    """Divides every row by its scale, the largest magnitude over the format's largest value.

    Both divisions are written as products with a reciprocal. XLA rewrites divisions that way in
    some programs but not in others, and a row must give the same values in all of them.
    """
    x = x.astype(jnp.float32)
    scales = _scales(jnp.max(jnp.abs(x), axis=1), format)
    return _values(x, (1.0 / scales)[:, None], format), scales


def dequantize_rows(
    values: Num[Array, "tokens d"], scales: Float32[Array, " tokens"], dtype: DTypeLike
) -> Float[Array, "tokens d"]:
    """Multiplies every row by its scale."""
    largest = jnp.finfo(dtype).max.astype(jnp.float32)
    return jnp.clip(values.astype(jnp.float32) * scales[:, None], -largest, largest).astype(dtype)


def quantize_weight(
    w: Float[Array, "*batch d_out d_in"],
    format: Format,
    block: tuple[int, int],
) -> QuantArray:
    """Divides every block by its scale, as `quantize_rows` does with a row."""
    w = w.astype(jnp.float32)
    largest = jnp.abs(w)
    for axis, size in zip((-2, -1), block, strict=True):
        largest = _block_maximum(largest, axis, size)
    scales = _scales(largest, format)
    inverse = spread_scales(1.0 / scales, w.shape, block)
    of_format = E8M0 if format == "mxfp4" else scales.dtype
    return QuantArray(_values(w, inverse, format), scales.astype(of_format), block)


def dequantize_weight(w: QuantArray, dtype: DTypeLike) -> Float[Array, "*batch d_out d_in"]:
    """Multiplies every block by its scale, after subtracting its zero point if it has one."""
    limit = jnp.finfo(dtype).max.astype(jnp.float32)
    mxfp4 = w.dtype == jnp.float4_e2m1fn
    values = _of_codes(w.values) if mxfp4 else from_bits(w.values).astype(jnp.float32)
    if w.zeros is not None:
        values -= spread_scales(w.zeros, w.shape, w.block)
    product = values * spread_scales(w.scales.astype(jnp.float32), w.shape, w.block)
    return jnp.clip(product, -limit, limit).astype(dtype)


def _of_codes(values: Num[Array, "..."]) -> Float32[Array, "..."]:
    """Converts E2M1 numbers by their codes, of which XLA:CPU makes half the work of a cast: the
    exponent and the one bit of the significand move to their places in FP32."""
    code = jax.lax.bitcast_convert_type(values, jnp.int4).astype(jnp.int32)
    size, half = code & 7, 126 << 23
    bits = jnp.where(size < 2, size * half, (size << 22) + half)  # 0 and 0.5 have no exponent
    return jax.lax.bitcast_convert_type(bits | (code & 8) << 28, jnp.float32)


def spread_scales(
    scales: Num[Array, "..."], shape: tuple[int, ...], block: tuple[int, int]
) -> Num[Array, "..."]:
    """Repeats every scale (or zero point) over its block, so that the result broadcasts with values
    of `shape`."""
    for axis, size in zip((-2, -1), block, strict=True):
        if size > 1:
            scales = jnp.repeat(scales, size, axis=axis)
            scales = jax.lax.slice_in_dim(scales, 0, shape[axis], axis=scales.ndim + axis)
    return scales


def _block_maximum(magnitudes: Array, axis: int, size: int) -> Array:
    """Returns the maximum of every `size` neighbours along the (negative) axis; 0: of all."""
    if size == 0:
        return jnp.max(magnitudes, axis=axis, keepdims=True)
    if size == 1:
        return magnitudes
    axis += magnitudes.ndim
    count = -(-magnitudes.shape[axis] // size)
    padding = [(0, 0)] * magnitudes.ndim
    padding[axis] = (0, count * size - magnitudes.shape[axis])
    shape = (*magnitudes.shape[:axis], count, size, *magnitudes.shape[axis + 1 :])
    return jnp.max(jnp.pad(magnitudes, padding).reshape(shape), axis=axis + 1)


def _scales(largest: Array, format: Format) -> Array:
    """Returns the scales of groups of numbers with these largest magnitudes. In MXFP4 the largest
    gets the exponent of E2M1's largest, 2 (OCP Microscaling Formats 1.0, §6.3)."""
    if format == "mxfp4":
        exponent = (jax.lax.bitcast_convert_type(largest, jnp.int32) >> 23) - 2
        scales = jax.lax.bitcast_convert_type(jnp.maximum(exponent, 1) << 23, jnp.float32)
        scales = jnp.where(jnp.isfinite(largest), scales, jnp.nan)
    else:
        scales = largest * jnp.float32(1.0 / LARGEST[format])
    # Some hardware flushes subnormal numbers to zero. With this limit they become zero everywhere.
    return jnp.where(scales < SMALLEST_SCALE, 1.0, scales)


def _values(x: Array, inverse: Array, format: Format) -> Array:
    """Returns FP32 numbers times the inverse of their scales, rounded to the format."""
    # Rounding may give just above the largest value, and float8_e4m3fn has no infinity: too large
    # would become NaN.
    scaled = jnp.clip(x * inverse, -LARGEST[format], LARGEST[format])
    if format in ("fp8", "mxfp4"):
        return scaled.astype(jnp.float8_e4m3fn if format == "fp8" else jnp.float4_e2m1fn)
    return jnp.round(scaled).astype(jnp.int8 if format == "int8" else jnp.int4)
