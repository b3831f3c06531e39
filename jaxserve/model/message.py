"""The dispatch message of a layer, unpacked: what the attention role sends to the ffn role; and its
rows in the formats of the wire.

Activations in 8 bits have one scale per token on the wire, and one per token and head in the KV
cache. `float32` and `bfloat16` are casts without scales; `fp8` (e4m3) and `int8` are symmetric and
scaled by the row's largest magnitude (Step-3 §4.3: FP8 dispatch; xDeepServe §4.6: INT8).
"""

from typing import NamedTuple, TypeGuard

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.config.formats import FORMATS, FormatName, scaled
from pallas_kernels.norm_quantize import rms_norm, rms_norm_quantize
from pallas_kernels.quantize import Format, QuantArray, dequantize_rows, quantize_rows


class EncodedRows(NamedTuple):
    """Rows of activations encoded in one of the wire formats."""

    values: Array
    """[tokens, d_model], in the format's storage dtype."""
    scales: Float[Array, " tokens"] | None
    """FP32, one per row; None for formats without scales."""

    def quantised(self) -> QuantArray:
        """Rows in 8 bits, as products take them."""
        assert self.scales is not None
        return QuantArray(self.values, self.scales[:, None], (1, 0))


def storage(row_format: FormatName) -> jnp.dtype:
    """Dtype of rows on the wire."""
    return jnp.dtype(FORMATS[row_format].dtype)


def cached_dtype(cache_format: FormatName) -> jnp.dtype:
    """Returns the dtype of the cache's values. FP8 (e4m3) values are stored as their bits, which
    are cheaper to move (`quantize/bits.py`)."""
    dtype = storage(cache_format)
    return jnp.dtype(jnp.uint8) if dtype == jnp.float8_e4m3fn else dtype


def has_scales(row_format: FormatName) -> TypeGuard[Format]:
    """Returns whether each row of this format has a scale."""
    return scaled(row_format)


def encode_rows(x: Float[Array, "tokens d_model"], row_format: FormatName) -> EncodedRows:
    """Values in the format's storage dtype and, for 8-bit formats, FP32 scales."""
    if has_scales(row_format):
        return EncodedRows(*quantize_rows(x, row_format))
    return EncodedRows(x.astype(storage(row_format)), None)


def norm_and_encode_rows(
    x: Float[Array, "tokens d_model"],
    weight: Float[Array, " d_model"],
    epsilon: float,
    row_format: FormatName,
) -> tuple[Float[Array, "tokens d_model"], EncodedRows]:
    """`rms_norm` followed by `encode_rows`, in one kernel where the platform has one."""
    if has_scales(row_format):
        normed, values, scales = rms_norm_quantize(x, weight, epsilon, row_format)
        return normed, EncodedRows(values, scales)
    normed = rms_norm(x, weight, epsilon)
    return normed, encode_rows(normed, row_format)


def decode_rows(
    values: Array, scales: Float[Array, " tokens"] | None, dtype: jnp.dtype
) -> Float[Array, "tokens d_model"]:
    """Decodes what `encode_rows` encoded, to `dtype`."""
    if scales is None:
        return values.astype(dtype)
    return dequantize_rows(values, scales, dtype)


class DispatchMessage(NamedTuple):
    """A message, unpacked."""

    tokens: Float[Array, "tokens d_model"]
    experts: Int[Array, "tokens top_k"] | None
    """None in dense layers."""
    gates: Float[Array, "tokens top_k"] | None
    encoded: EncodedRows | None = None
    """The tokens encoded for the wire, in 8 bits: if the norm already quantised them or, behind the
    link, if they came in it; else None. On TPUs `wide` then."""
    wide: EncodedRows | None = None
    """The same behind the link, as the first columns of the received rows, so that picking some of
    these copies no others."""
