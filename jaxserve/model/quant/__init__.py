"""Number formats: what a value looks like in weights, in the KV cache and on the wire."""

from jaxserve.model.quant.matmul import matmul
from jaxserve.model.quant.rows import quantize_heads
from pallas_kernels.quantize import (
    QuantArray,
    WeightFormat,
    as_bits,
    dequantize_weight,
    from_bits,
    from_bytes,
    in_bytes,
    quantize_weight,
    sliceable,
)

__all__ = [
    "QuantArray",
    "WeightFormat",
    "as_bits",
    "dequantize_weight",
    "from_bits",
    "from_bytes",
    "in_bytes",
    "matmul",
    "quantize_heads",
    "quantize_weight",
    "sliceable",
]
