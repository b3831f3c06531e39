"""Quantisation to 8 bits: rows with one scale each, weights with one per row or block."""

from pallas_kernels.quantize.api import (
    Format,
    WeightFormat,
    dequantize_rows,
    dequantize_weight,
    quantize_rows,
    quantize_weight,
)
from pallas_kernels.quantize.bits import as_bits, from_bits
from pallas_kernels.quantize.quant_array import (
    EIGHT_BITS,
    QuantArray,
    check_quant_array,
    scales_shape,
)

__all__ = [
    "EIGHT_BITS",
    "Format",
    "QuantArray",
    "WeightFormat",
    "as_bits",
    "check_quant_array",
    "dequantize_rows",
    "dequantize_weight",
    "from_bits",
    "quantize_rows",
    "quantize_weight",
    "scales_shape",
]
