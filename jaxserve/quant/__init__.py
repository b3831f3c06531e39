"""Number formats: what a value looks like in weights, in the KV cache and on the wire."""

from jaxserve.quant.matmul import matmul
from jaxserve.quant.rows import quantize_heads
from pallas_kernels.quantize import (
    QuantArray,
    WeightFormat,
    dequantize_weight,
    quantize_weight,
)

__all__ = [
    "QuantArray",
    "WeightFormat",
    "dequantize_weight",
    "matmul",
    "quantize_heads",
    "quantize_weight",
]
