"""Quantisation of rows, in NumPy; for the tests of all code that does it."""

import ml_dtypes
import numpy as np

LARGEST = {"fp8": 448.0, "int8": 127.0}
VALUES = {"fp8": ml_dtypes.float8_e4m3fn, "int8": np.int8}


def quantize_numpy(rows, format):
    """Values [..., columns] and FP32 scales [...] of rows.

    Multiplies by reciprocals and does not divide, bit for bit as `quantize_rows`: what a compiler
    makes of a division depends on the program around it.
    """
    rows, largest = rows.astype(np.float32), np.float32(LARGEST[format])
    scales = np.abs(rows).max(axis=-1) * (np.float32(1) / largest)
    scales = np.where(scales < np.float32(2.0**-100), np.float32(1), scales)
    scaled = np.clip(rows * (np.float32(1) / scales)[..., None], -largest, largest)
    return (np.rint(scaled) if format == "int8" else scaled).astype(VALUES[format]), scales
