"""Quantising to 8 bits: rows with one scale each, weights with one a column or a block."""

from pallas_kernels.quantize.api import (
    Format,
    WeightFormat,
    dequantize_rows,
    dequantize_weight,
    quantize_rows,
    quantize_weight,
)
from pallas_kernels.quantize.quant_array import QuantArray, check_quant_array, scales_shape

__all__ = [
    "Format",
    "QuantArray",
    "WeightFormat",
    "check_quant_array",
    "dequantize_rows",
    "dequantize_weight",
    "quantize_rows",
    "quantize_weight",
    "scales_shape",
]
