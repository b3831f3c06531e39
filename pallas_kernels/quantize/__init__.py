"""Quantisation to 8 bits: rows with one scale each, weights with one per row or block; INT4 and
MXFP4 weights with one per group."""

from pallas_kernels.quantize.api import (
    WeightFormat,
    dequantize_rows,
    dequantize_weight,
    quantize_rows,
    quantize_weight,
)
from pallas_kernels.quantize.bits import (
    array_bytes,
    as_bits,
    from_bits,
    from_bytes,
    in_bytes,
    sliceable,
)
from pallas_kernels.quantize.quant_array import (
    E8M0,
    EIGHT_BITS,
    FOUR_BITS,
    GROUPS,
    Format,
    QuantArray,
    StackEntry,
    check_quant_array,
    scales_shape,
)
from pallas_kernels.quantize.words import Words, entry_words, in_arrays

__all__ = [
    "EIGHT_BITS",
    "FOUR_BITS",
    "GROUPS",
    "E8M0",
    "Format",
    "QuantArray",
    "StackEntry",
    "Words",
    "WeightFormat",
    "array_bytes",
    "as_bits",
    "check_quant_array",
    "dequantize_rows",
    "dequantize_weight",
    "entry_words",
    "from_bits",
    "from_bytes",
    "in_arrays",
    "in_bytes",
    "quantize_rows",
    "quantize_weight",
    "scales_shape",
    "sliceable",
]
