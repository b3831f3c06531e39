"""What quantising rows means, in plain `jax.numpy`; also what runs where there is no kernel (CPU).

Called by `api.py`, which has checked the arguments, and by the tests of the kernels. Shares no code
with any kernel.
"""

from typing import Literal

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Num

INT8_LARGEST = 127.0
FP8_LARGEST = 448.0
SMALLEST_SCALE = 2.0**-100


def quantize_rows(
    x: Float[Array, "tokens d"], format: Literal["fp8", "int8"]
) -> tuple[Num[Array, "tokens d"], Float32[Array, " tokens"]]:
    """Divide every row by its scale, the largest magnitude over the format's largest value.

    Both divisions are products with a reciprocal: XLA turns them into that in some programs and not
    in others, and a row has to give the same values in all of them.
    """
    x = x.astype(jnp.float32)
    largest = FP8_LARGEST if format == "fp8" else INT8_LARGEST
    scales = jnp.max(jnp.abs(x), axis=1) * jnp.float32(1.0 / largest)
    # Some hardware takes subnormal numbers for zeros. With this limit they are zeros on all, as
    # part of a larger row too.
    scales = jnp.where(scales < SMALLEST_SCALE, 1.0, scales)
    # Rounding may give just above the largest value, and float8_e4m3fn has no infinity: too large
    # would become NaN.
    scaled = jnp.clip(x * (1.0 / scales)[:, None], -largest, largest)
    if format == "fp8":
        return scaled.astype(jnp.float8_e4m3fn), scales
    return jnp.round(scaled).astype(jnp.int8), scales


def dequantize_rows(
    values: Num[Array, "tokens d"], scales: Float32[Array, " tokens"], dtype: DTypeLike
) -> Float[Array, "tokens d"]:
    """Multiply every row by its scale."""
    largest = jnp.finfo(dtype).max.astype(jnp.float32)
    return jnp.clip(values.astype(jnp.float32) * scales[:, None], -largest, largest).astype(dtype)
