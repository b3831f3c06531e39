"""Definition of the op in plain `jax.numpy`; runs on devices without a kernel.

`rms_norm` is also used for all other norms of a model. Shares no code with the kernel.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Num

from pallas_kernels.quantize import Format, quantize_rows


def rms_norm(
    x: Float[Array, "*batch d"], weight: Float[Array, " d"], epsilon: float
) -> Float[Array, "*batch d"]:
    """RMSNorm in FP32, cast to the weight's dtype, times the weight, in x's dtype."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + epsilon)
    return (normed.astype(weight.dtype) * weight).astype(x.dtype)


def rms_norm_quantize(
    x: Float[Array, "tokens columns"],
    weight: Float[Array, " d"] | None,
    epsilon: float,
    format: Format,
) -> tuple[Float[Array, "tokens d"], Num[Array, "tokens d"], Float32[Array, " tokens"]]:
    """Applies `rms_norm`, then `quantize_rows` to its result."""
    normed = x if weight is None else rms_norm(x[:, : weight.shape[0]], weight, epsilon)
    values, scales = quantize_rows(normed, format)
    return normed, values, scales
