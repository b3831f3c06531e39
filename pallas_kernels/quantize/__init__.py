"""Quantising rows to 8 bits, one scale a row."""

from pallas_kernels.quantize.api import Format, dequantize_rows, quantize_rows

__all__ = ["Format", "dequantize_rows", "quantize_rows"]
