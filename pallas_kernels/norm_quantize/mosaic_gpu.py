"""RMSNorm with quantisation on Hopper GPUs (Pallas, Mosaic GPU): a block of threads a row.

Called by `api.py`, which has checked the arguments. A row stays in registers from the one time it
is read to the one time each result is written. A decode step has about as many rows as the GPU has
multiprocessors, so launches in sequence take the time. With more rows, a multiprocessor runs
several blocks at a time, which hide each other's waits.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Num

from pallas_kernels.mosaic_gpu import WARPGROUP, launch, load, quantise, store
from pallas_kernels.norm_quantize import reference
from pallas_kernels.quantize import Format
from pallas_kernels.target import Target
from pallas_kernels.tuned import Fields, checked_fields, require

MOST_COLUMNS = 8192
"""Most columns of a row, which the registers of a block hold."""
VECTORS = (8, 4, 2, 1)
"""Choices for the neighbouring columns that a thread holds: 8 of 16 bits are one access."""
TYPES = {"fp8": jnp.float8_e4m3fn, "int8": jnp.int8}
"""Dtypes of quantised values, by format."""


def gap(x: Array) -> str:
    """Returns the property of a call that the kernel does not cover; empty: none."""
    d = x.shape[1]
    if d % WARPGROUP or d > MOST_COLUMNS:
        return f"rows of {d} (multiples of {WARPGROUP} up to {MOST_COLUMNS})"
    return ""


def rms_norm_quantize(
    x: Float[Array, "tokens d"],
    weight: Float[Array, " d"],
    epsilon: float,
    format: Format,
    target: Target,
    tiles: Fields | None = None,
) -> tuple[Float[Array, "tokens d"], Num[Array, "tokens d"], Float32[Array, " tokens"]]:
    """Norms and quantises in one pass over x, if `gap` finds nothing in the call. `tiles` has one
    field, `vector`: neighbouring columns that a thread holds.

    Raises:
      ValueError: the tiles do not fit.
    """
    tokens, d = x.shape
    sizes = [size for size in VECTORS if d % (WARPGROUP * size) == 0]
    default = {"vector": sizes[0]}
    vector = (default | checked_fields("rms_norm_quantize", tiles or {}, default))["vector"]
    limits = f"one of {sizes}, of which {WARPGROUP} divide rows of {d}"
    require(vector in sizes, "rms_norm_quantize", "vector", vector, limits)
    if tokens == 0:
        return reference.rms_norm_quantize(x, weight, epsilon, format)
    body = functools.partial(_body, epsilon=epsilon, vector=vector)
    out_type = (
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct(x.shape, TYPES[format]),
        jax.ShapeDtypeStruct((tokens,), jnp.float32),
    )
    kernel = launch(body, "rms_norm_quantize", out_type, tokens, "row", target)
    normed, values, scales = kernel(x, weight)
    return normed, values, scales


def _body(
    x: Any,  # [tokens, d]
    weight: Any,  # [d]
    normed: Any,  # [tokens, d]
    values: Any,  # [tokens, d]
    scales: Any,  # [tokens]
    *,
    epsilon: float,
    vector: int,
) -> None:
    """Norms and quantises one row."""
    row, d = lax.axis_index("row"), x.shape[1]
    layout = plgpu.Layout.WG_STRIDED((d,), vec_size=vector)
    wide = load(x.at[row], layout).astype(jnp.float32)
    inverse = lax.rsqrt(jnp.sum(wide * wide) / d + epsilon)
    factors = load(weight, layout)
    rounded = (wide * inverse).astype(x.dtype) * factors
    store(normed.at[row], rounded)
    narrow, scale = quantise(rounded.astype(jnp.float32), values.dtype)
    store(values.at[row], narrow)
    scales[row] = scale
