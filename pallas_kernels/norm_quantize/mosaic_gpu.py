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
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32, Num

from pallas_kernels.mosaic_gpu import WARPGROUP, launch, load, quantise, store, strided
from pallas_kernels.norm_quantize import reference
from pallas_kernels.quantize import Format
from pallas_kernels.target import Target

MOST_COLUMNS = {True: 8192, False: 18432}
"""Most columns of a row that is normed, and of others, which the registers of a block hold."""
TYPES = {"fp8": jnp.float8_e4m3fn, "int8": jnp.int8}
"""Dtypes of quantised values, by format."""


def gap(x: Array, weight: Array | None) -> str:
    """Returns the property of a call that the kernel does not cover; empty: none."""
    d = x.shape[1] if weight is None else weight.shape[0]
    most = MOST_COLUMNS[weight is not None]
    return (
        f"rows of {d} (multiples of {WARPGROUP} up to {most})" if d % WARPGROUP or d > most else ""
    )


def rms_norm_quantize(
    x: Float[Array, "tokens columns"],
    weight: Float[Array, " d"] | None,
    epsilon: float,
    format: Format,
    target: Target,
) -> tuple[Float[Array, "tokens d"], Num[Array, "tokens d"], Float32[Array, " tokens"]]:
    """Norms and quantises in one pass over x, if `gap` finds nothing in the call."""
    tokens, d = x.shape[0], x.shape[1] if weight is None else weight.shape[0]
    if tokens == 0:
        return reference.rms_norm_quantize(x, weight, epsilon, format)
    out_type = [
        jax.ShapeDtypeStruct((tokens, d), TYPES[format]),
        jax.ShapeDtypeStruct((tokens,), jnp.float32),
    ]
    if weight is None:
        return x, *launch(_body, "quantize_rows", out_type, tokens, "row", target)(x)
    body = functools.partial(_body, epsilon=epsilon)
    out_type.append(jax.ShapeDtypeStruct((tokens, d), x.dtype))
    kernel = launch(body, "rms_norm_quantize", out_type, tokens, "row", target)
    values, scales, normed = kernel(x, weight)
    return normed, values, scales


def _body(x: Any, *refs: Any, epsilon: float | None = None) -> None:
    """Quantises one row of x [tokens, columns]; norms it before if there is an epsilon.

    Args:
      refs: values [tokens, d] and scales [tokens]; with an epsilon between a weight [d] and normed
        rows [tokens, d].
    """
    weight, values, scales, normed = (None, *refs, None) if epsilon is None else refs
    row, d = lax.axis_index("row"), values.shape[1]
    source, layout = x.at[row, pl.ds(0, d)], strided(d)
    wide = load(source, layout).astype(jnp.float32)
    if weight is not None:
        inverse = lax.rsqrt(jnp.sum(wide * wide) / d + epsilon)
        rounded = (wide * inverse).astype(x.dtype) * load(weight, layout)
        store(normed.at[row], rounded)
        wide = rounded.astype(jnp.float32)
    narrow, scale = quantise(wide, values.dtype)
    store(values.at[row], narrow)
    scales[row] = scale
