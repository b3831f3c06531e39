"""GPTQ: rounds a matrix to INT8 or INT4, column by column, and moves each column's error into the
columns that are not rounded yet (arXiv 2210.17323; xDeepServe §4.7).

Called by `layers.py`. Pure NumPy on one matrix at a time; knows no model.
"""

import contextlib
import functools
from typing import Literal, NamedTuple

import numpy as np

LARGEST = 127.0
SMALLEST_SCALE = 2.0**-100
BLOCK = 128
"""Columns whose errors are applied to the rest of the matrix in one product."""
DAMPING = 0.01
"""Share of the Hessian's mean diagonal that is added to the diagonal (the paper's §3.3)."""


SHRUNK = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Clipping ratios tried for INT4: the share of a group's largest magnitude that becomes the largest
value. Larger weights are clipped, and the others are rounded more finely."""


class RoundingTarget(NamedTuple):
    """Number format that matrices are rounded to, and format of their inputs."""

    bits: Literal[8, 4] = 8
    group: int = 0
    """Columns that share a scale; 0: all."""
    int8_rows: bool = True
    """Whether inputs are quantised to INT8, with one scale per token."""

    @property
    def largest(self) -> float:
        """Largest integer value: 127 or 7."""
        return float(2 ** (self.bits - 1) - 1)


INT8 = RoundingTarget()


class IntMatrix(NamedTuple):
    """A quantised matrix in the format of our kernels."""

    values: np.ndarray
    """int8 [d_out, d_in], for 4 bits too."""
    scales: np.ndarray
    """FP32 [d_out, groups]."""

    @property
    def floats(self) -> np.ndarray:
        """FP32 [d_out, d_in]."""
        return dequantised(self.values, self.scales)


def dequantised(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Values [..., d_out, d_in] times scales [..., d_out, groups], FP32."""
    return values.astype(np.float32) * _spread(scales, values.shape[-1])


def _spread(scales: np.ndarray, d_in: int) -> np.ndarray:
    """Expands scales [..., groups] to one per column [..., d_in]; a single group stays [..., 1]."""
    groups = scales.shape[-1]
    if groups == 1:
        return scales
    # Group sizes are powers of two. If several explain the number of groups, they are equivalent.
    group = next(size for size in (2**n for n in range(32)) if -(-d_in // size) == groups)
    return np.repeat(scales, group, axis=-1)[..., :d_in]


def group_scales(
    weight: np.ndarray, target: RoundingTarget, importance: np.ndarray | None = None
) -> np.ndarray:
    """Scales of a matrix, FP32 [d_out, groups]. For INT4, the clipping ratio (`SHRUNK`) with the
    least squared error is chosen for each group.

    Args:
      importance: weight of each column's error, [d_in]; None: equal weights.
    """
    if target == INT8:
        return row_scales(weight)
    weight, d_in = np.asarray(weight, np.float32), weight.shape[1]
    starts = np.arange(0, d_in, target.group or d_in)
    largest = np.maximum.reduceat(np.abs(weight), starts, axis=1)
    whole = largest * np.float32(1 / target.largest)
    whole = np.where(whole < SMALLEST_SCALE, np.float32(1), whole)
    if target.bits == 8:
        return whole
    tried = [whole * np.float32(share) for share in SHRUNK]
    errors = []
    for scales in tried:
        spread = _spread(scales, d_in)
        near = np.clip(np.rint(weight / spread), -target.largest, target.largest) * spread
        squares = np.square(near - weight) * (1 if importance is None else importance)
        errors.append(np.add.reduceat(squares, starts, axis=1))
    return np.choose(np.argmin(errors, axis=0), tried).astype(np.float32)


def row_scales(weight: np.ndarray) -> np.ndarray:
    """Scales FP32 [d_out, 1]: the largest magnitude of every output channel over 127, the same as
    `quantize_weight` computes."""
    largest = np.abs(weight).max(axis=1, keepdims=True).astype(np.float32)
    scales = largest * np.float32(1 / LARGEST)
    return np.where(scales < SMALLEST_SCALE, np.float32(1), scales)


def rounded(weight: np.ndarray, target: RoundingTarget = INT8) -> IntMatrix:
    """Rounds every weight to the nearest value of its channel or group (RTN)."""
    weight = np.asarray(weight, np.float32)
    scales = group_scales(weight, target)
    inverse = 1 / _spread(scales, weight.shape[1])
    values = np.clip(np.rint(weight * inverse), -target.largest, target.largest)
    return IntMatrix(values.astype(np.int8), scales)


class Hessian:
    """Second moments of a matrix's inputs, and the factor that GPTQ derives from them.

    Args:
      rows: the inputs, [samples, d_in].
    """

    def __init__(self, rows: np.ndarray):
        rows = np.asarray(rows, np.float32)
        self.samples, self.d_in = rows.shape
        self.moments = (rows.T @ rows).astype(np.float64)
        self.order = np.argsort(-self.moments.diagonal(), kind="stable")
        """Columns by falling moment: important columns are rounded first, while most other columns
        can still compensate for their error."""

    @functools.cached_property
    def inverse_factor(self) -> np.ndarray | None:
        """U [d_in, d_in], upper triangular, with UᵀU the inverse of the damped moments, in `order`.
        None if all inputs are zero, or no tried damping makes the moments invertible."""
        moments = self.moments[np.ix_(self.order, self.order)]
        mean = float(moments.diagonal().mean())
        if not (mean > 0 and np.isfinite(mean)):
            return None
        for damping in (DAMPING, 10 * DAMPING, 100 * DAMPING):
            damped = moments + damping * mean * np.eye(self.d_in)
            with contextlib.suppress(np.linalg.LinAlgError):
                return np.linalg.cholesky(np.linalg.inv(damped)).T
        return None


def gptq(weight: np.ndarray, hessian: Hessian, target: RoundingTarget = INT8) -> IntMatrix:
    """Rounds a matrix to INT8 or INT4 so that its products with inputs like the Hessian's change
    little.

    A column's error over U_ii, times the rest of U's row, is subtracted from the later columns
    (the paper's equation 2 and algorithm 1). Without a factor, weights are rounded to nearest. A
    group consists of neighbouring columns, and its scale comes from the original weights,
    regardless of the order in which columns are rounded.

    Args:
      weight: [d_out, d_in] floats.
    """
    factor = hessian.inverse_factor
    if factor is None:
        return rounded(weight, target)
    scales = group_scales(weight, target, hessian.moments.diagonal())
    spread = np.broadcast_to(_spread(scales, hessian.d_in), weight.shape)
    # Transposed, like `rest` below.
    of_columns = np.ascontiguousarray(spread.T[hessian.order])
    largest = target.largest
    # Transposed, so that the columns that change together are contiguous in memory.
    rest = np.ascontiguousarray(np.asarray(weight, np.float32).T[hessian.order])
    values = np.empty(rest.shape, np.int8)
    upper = factor.astype(np.float32)
    for start in range(0, hessian.d_in, BLOCK):
        stop = min(start + BLOCK, hessian.d_in)
        errors = np.empty((stop - start, len(scales)), np.float32)
        for column in range(start, stop):
            flat = of_columns[column]
            near = np.clip(np.rint(rest[column] * (1 / flat)), -largest, largest)
            values[column] = near
            error = (rest[column] - near * flat) / upper[column, column]
            rest[column + 1 : stop] -= upper[column, column + 1 : stop, None] * error
            errors[column - start] = error
        rest[stop:] -= upper[start:stop, stop:].T @ errors
    placed = np.empty((len(scales), hessian.d_in), np.int8)
    placed[:, hessian.order] = values.T
    return IntMatrix(placed, scales)
