"""GPTQ: rounds a matrix to INT8, column by column, and moves each column's error into those that
are still to be rounded (arXiv 2210.17323; xDeepServe §4.7).

Called by `layers.py`. Pure NumPy on one matrix at a time; knows no model.
"""

import functools
from typing import NamedTuple

import numpy as np

LARGEST = 127.0
SMALLEST_SCALE = 2.0**-100
BLOCK = 128
"""Columns whose errors reach the rest of the matrix in one product."""
DAMPING = 0.01
"""Of the Hessian's mean diagonal, added to the diagonal (the paper's §3.3)."""


class Int8Matrix(NamedTuple):
    """A matrix in the format of our kernels."""

    values: np.ndarray
    """int8 [d_out, d_in]."""
    scales: np.ndarray
    """FP32 [d_out, 1]."""

    @property
    def floats(self) -> np.ndarray:
        """FP32 [d_out, d_in]."""
        return self.values.astype(np.float32) * self.scales


def row_scales(weight: np.ndarray) -> np.ndarray:
    """FP32 [d_out, 1]: the largest magnitude of every output channel over 127, as `quantize_weight`
    has it."""
    largest = np.abs(weight).max(axis=1, keepdims=True).astype(np.float32)
    scales = largest * np.float32(1 / LARGEST)
    return np.where(scales < SMALLEST_SCALE, np.float32(1), scales)


def rounded(weight: np.ndarray) -> Int8Matrix:
    """Every weight rounded to the nearest of its channel's 255 values (RTN)."""
    weight = np.asarray(weight, np.float32)
    scales = row_scales(weight)
    values = np.clip(np.rint(weight * (1 / scales)), -LARGEST, LARGEST)
    return Int8Matrix(values.astype(np.int8), scales)


class Hessian:
    """The second moments of a matrix's inputs, and what GPTQ needs of them.

    Args:
      rows: [samples, d_in], the inputs.
    """

    def __init__(self, rows: np.ndarray):
        rows = np.asarray(rows, np.float32)
        self.samples, self.d_in = rows.shape
        self.moments = (rows.T @ rows).astype(np.float64)
        self.order = np.argsort(-self.moments.diagonal(), kind="stable")
        """Columns by falling moment: what matters most is rounded while most others can still make
        up for it."""

    @functools.cached_property
    def inverse_factor(self) -> np.ndarray | None:
        """U [d_in, d_in], upper triangular, with UᵀU the inverse of the damped moments, in `order`;
        None: no input was ever anything but zero, or no damping makes the inverse exist."""
        moments = self.moments[np.ix_(self.order, self.order)]
        mean = float(moments.diagonal().mean())
        if not (mean > 0 and np.isfinite(mean)):
            return None
        for damping in (DAMPING, 10 * DAMPING, 100 * DAMPING):
            damped = moments + damping * mean * np.eye(self.d_in)
            try:
                return np.linalg.cholesky(np.linalg.inv(damped)).T
            except np.linalg.LinAlgError:
                continue
        return None


def gptq(weight: np.ndarray, hessian: Hessian) -> Int8Matrix:
    """The matrix in INT8, so that its products with inputs like the Hessian's change little.

    A column's error over U_ii, times the rest of U's row, is taken from the columns behind it
    (the paper's equation 2 and algorithm 1). Without a factor, weights are rounded to the nearest.

    Args:
      weight: [d_out, d_in] floats.
    """
    factor = hessian.inverse_factor
    if factor is None:
        return rounded(weight)
    scales = row_scales(weight)
    flat = scales[:, 0]
    # Columns as rows: what is changed together lies together.
    rest = np.ascontiguousarray(np.asarray(weight, np.float32).T[hessian.order])
    values = np.empty(rest.shape, np.int8)
    upper = factor.astype(np.float32)
    for start in range(0, hessian.d_in, BLOCK):
        stop = min(start + BLOCK, hessian.d_in)
        errors = np.empty((stop - start, len(flat)), np.float32)
        for column in range(start, stop):
            near = np.clip(np.rint(rest[column] * (1 / flat)), -LARGEST, LARGEST)
            values[column] = near
            error = (rest[column] - near * flat) / upper[column, column]
            rest[column + 1 : stop] -= upper[column, column + 1 : stop, None] * error
            errors[column - start] = error
        rest[stop:] -= upper[start:stop, stop:].T @ errors
    placed = np.empty((len(flat), hessian.d_in), np.int8)
    placed[:, hessian.order] = values.T
    return Int8Matrix(placed, scales)
