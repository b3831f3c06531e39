"""Rows times a quantised weight, in plain `jax.numpy`.

Defines the arithmetic of every op with `QuantArray` weights; called by the reference of
`grouped_matmul` and by models' linear maps. Shares no code with any kernel.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Num

from pallas_kernels.quantize.bits import as_bits, from_bits
from pallas_kernels.quantize.quant_array import QuantArray
from pallas_kernels.quantize.reference import (
    dequantize_weight,
    quantize_rows,
    quantize_weight,
    spread_scales,
)

ROW_BLOCK = 128
"""Columns of a row that share a scale, if both factors are quantised block by block."""


def product_of_rows(
    x: Num[Array, "*batch rows d_in"],
    w: Num[Array, "*batch d_out d_in"],
    *,
    precision: jax.lax.Precision | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Num[Array, "*batch rows d_out"]:
    """Returns x · wᵀ, summed in `dtype`: every row of x with every row of w."""
    return jnp.einsum("...ti,...oi->...to", x, w, precision=precision, preferred_element_type=dtype)


def quant_product(x: Float[Array, "rows d_in"], w: QuantArray) -> Float32[Array, "rows d_out"]:
    """Returns x · wᵀ for one weight [d_out, d_in]; the caller has checked shapes and dtypes.

    FP8 weights: x is not quantised; its products with the e4m3 values are accumulated in FP32 over
    the columns of one block, scaled, and added up in FP32, in order. INT4 weights: the same, with
    the differences between values and zero points. MXFP4 weights become floats. INT8 weights: every
    row of x is quantised to INT8 over the whole of d_in; the sums are exact (int32) and multiplied
    by `x_scale * w_scale`.
    """
    if w.dtype == jnp.int8:
        values, x_scales = quantize_rows(x, "int8")
        return _sum_of_blocks(values, w, x_scales)
    return quant_product_of_floats(x, w)


def quant_product_of_floats(
    x: Float[Array, "rows d_in"], w: QuantArray
) -> Float32[Array, "rows d_out"]:
    """Returns x · wᵀ without quantising x, for w in any format; the caller has checked w and x.

    INT8 and INT4 values are treated as `quant_product` treats FP8 ones: BF16 and FP16 represent
    them exactly, also INT4 values minus their zero points. MXFP4 weights are dequantised, exactly
    in BF16, whose exponents span those of the scales.
    """
    if w.dtype == jnp.float4_e2m1fn:
        return _dot(x, dequantize_weight(w, x.dtype))
    return _sum_of_blocks(x, w, None)


def quant_product_of_blocks(
    x: Float[Array, "rows d_in"], w: QuantArray
) -> Float32[Array, "rows d_out"]:
    """Returns x · wᵀ with both operands in 8 bits, or w in 4; the caller has checked shapes, dtypes
    and blocks.

    Every row of x is quantised to the format of w (INT8 for INT4), with a scale for every
    `ROW_BLOCK` columns. The sums over these columns, or over an INT4 group where that is smaller
    (int32 or FP32), times the scales of both are added up in FP32, in order. A block of w has
    `ROW_BLOCK` columns, a multiple, or all; in INT4 also a part of one. If INT4 values have zero
    points, these are subtracted: the differences are 8-bit integers.
    """
    d_out, d_in = w.shape
    integers = w.dtype in (jnp.int8, jnp.int4)
    rows = quantize_weight(x, "int8" if integers else "fp8", (1, ROW_BLOCK))
    padding = ((0, 0), (0, rows.scales.shape[1] * ROW_BLOCK - d_in))  # zeros add nothing
    left, right = (jnp.pad(as_bits(values), padding) for values in (rows.values, w.values))
    block_in = min(w.block[1] or d_in, d_in)
    size = min(ROW_BLOCK, block_in) if block_in < d_in else ROW_BLOCK

    def add(index: Array, total: Array) -> Array:
        start = index * size
        of_row, of_weight = start // ROW_BLOCK, start // block_in
        factors = [
            jax.lax.dynamic_slice_in_dim(bits, start, size, axis=1) for bits in (left, right)
        ]
        if integers:
            values = factors[1].astype(jnp.int8)
            if w.zeros is not None:
                zeros = jax.lax.dynamic_slice_in_dim(w.zeros, of_weight, 1, axis=1)
                values -= spread_scales(zeros, (d_out, 1), (w.block[0], 1))
            sums = product_of_rows(factors[0], values, dtype=jnp.int32).astype(jnp.float32)
        else:
            floats = [from_bits(bits).astype(jnp.float32) for bits in factors]
            sums = product_of_rows(*floats, precision=jax.lax.Precision.HIGHEST)
        x_scales = jax.lax.dynamic_slice_in_dim(rows.scales, of_row, 1, axis=1)
        w_scales = jax.lax.dynamic_slice_in_dim(w.scales, of_weight, 1, axis=1)
        return total + sums * (x_scales * spread_scales(w_scales, (d_out, 1), (w.block[0], 1)).T)

    blocks = -(-d_in // size)
    first = add(jnp.int32(0), jnp.zeros((x.shape[0], d_out), jnp.float32))
    return jax.lax.fori_loop(1, blocks, add, first) if blocks > 1 else first


def _sum_of_blocks(
    x: Array, w: QuantArray, x_scales: Float32[Array, " rows"] | None
) -> Float32[Array, "rows d_out"]:
    d_out, d_in = w.shape
    block = min(w.block[1] or d_in, d_in)
    # Values that are not sliced need no cast, which on CPU is a copy.
    bits = w.values if block == d_in else as_bits(w.values)

    def partial_sum(index: Array | int, size: int) -> Array:
        start = index * block
        columns = jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)
        values = jax.lax.dynamic_slice_in_dim(bits, start, size, axis=1)
        if w.zeros is not None:
            zeros = jax.lax.dynamic_slice_in_dim(w.zeros, index, 1, axis=1)
            values = values.astype(jnp.int8) - spread_scales(zeros, (d_out, 1), (w.block[0], 1))
        scales = jax.lax.dynamic_slice_in_dim(w.scales, index, 1, axis=1)  # [blocks of d_out, 1]
        scales = spread_scales(scales, (d_out, 1), (w.block[0], 1)).T
        if x_scales is not None:
            scales = x_scales[:, None] * scales
        return _dot(columns, values).astype(jnp.float32) * scales

    whole, rest = divmod(d_in, block)
    # A loop, and not all blocks at once: their sums would take more memory than the weights.
    total = partial_sum(0, block)
    if whole > 1:
        total = jax.lax.fori_loop(
            1, whole, lambda index, total: total + partial_sum(index, block), total
        )
    return total + partial_sum(whole, rest) if rest else total


def _dot(x: Array, values: Array) -> Array:
    """Multiplies by quantised values: for INT8 x summed in int32, otherwise in x's dtype and FP32.

    BF16 represents every e4m3 number and every 8-bit integer exactly.
    """
    if x.dtype == jnp.int8:
        return product_of_rows(x, values.astype(jnp.int8), dtype=jnp.int32)
    return product_of_rows(
        x, from_bits(values).astype(x.dtype), precision=jax.lax.Precision.HIGHEST
    )
