"""SmoothQuant: divides channels with wide activations where they are written, and multiplies them
where they are read, so that neither side is hard to quantise (arXiv 2211.10438; xDeepServe §4.7).

Called by `layers.py`. Scales are powers of two: dividing and multiplying by them is exact in every
float format. So the smoothed model is the same function, bit for bit in FP32 and BF16, and a router
that reads the channels sees the same logits.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxserve.calibration.gptq import INT8, LARGEST, RoundingTarget, rounded, row_scales

STRENGTHS = (0.0, 0.35, 0.5, 0.65, 0.8)
"""How much of a channel's width moves from activations to weights (the paper's α); 0: none."""
ROWS = 256
"""Most rows of inputs on which strengths are compared."""


class Reader(NamedTuple):
    """A matrix that reads the channels, with samples of its input."""

    weight: np.ndarray
    """FP32 [d_out, d_in]."""
    rows: np.ndarray
    """FP32 [samples, d_in]."""


class Smoothing(NamedTuple):
    """Divisors of the channels, and the strength that they come from."""

    scales: np.ndarray
    """FP32 [channels], powers of two."""
    strength: float


def smoothed(
    rows: np.ndarray,
    columns: np.ndarray,
    readers: Sequence[Reader],
    group: int = 1,
    target: RoundingTarget = INT8,
) -> Smoothing:
    """Chooses the strength with the smallest error of the readers' quantised products, compared
    with their FP32 products.

    Args:
      rows: largest magnitude of every channel in the readers' inputs, [channels · group].
      columns: largest magnitude of the readers' weights per channel, same shape.
      readers: matrices to compare on; may be a sample of all readers.
      group: number of query heads that read the same head's channels. If above 1, `rows` and
        `columns` are [heads, group, width].
      target: format of the quantised readers. If inputs stay floats, smoothing only makes weights
        of wide channels be rounded more finely (AWQ, arXiv 2306.00978).
    """
    if group > 1:
        rows, columns = rows.max(axis=1), columns.max(axis=1)
    shape = rows.shape
    tried = [
        Smoothing(_scales(rows.reshape(-1), columns.reshape(-1), strength), strength)
        for strength in STRENGTHS
    ]

    def error(one: Smoothing) -> float:
        spread = spread_over(one.scales, shape, group)
        return sum(_error(reader, spread, target) for reader in readers)

    return min(tried, key=error)


def spread_over(scales: np.ndarray, shape: tuple[int, ...], group: int) -> np.ndarray:
    """Repeats scales of channels [heads · width] for the readers' columns
    [heads · group · width]."""
    if group == 1:
        return scales
    heads, width = shape
    return np.repeat(scales.reshape(heads, 1, width), group, axis=1).reshape(-1)


def widest(parts: Iterable[np.ndarray]) -> np.ndarray:
    """The largest magnitude of every column over all parts [rows, columns]."""
    return np.max([np.abs(part).max(axis=0, initial=0.0) for part in parts], axis=0)


def _scales(rows: np.ndarray, columns: np.ndarray, strength: float) -> np.ndarray:
    """Scales max|X|^α / max|W|^(1 - α) (the paper's equation 4), rounded to a power of two; 1 for
    channels whose inputs or weights are all zero."""
    if strength == 0:
        return np.ones(rows.shape, np.float32)
    used = (rows > 0) & (columns > 0)
    x, w = np.where(used, rows, 1.0), np.where(used, columns, 1.0)
    power = np.rint(strength * np.log2(x) - (1 - strength) * np.log2(w))
    return np.where(used, np.exp2(np.clip(power, -60, 60)), 1.0).astype(np.float32)


def _error(reader: Reader, scales: np.ndarray, target: RoundingTarget) -> float:
    """Squared error of the reader's products when weights are rounded to the target, and inputs to
    INT8 with one scale per token if the target says so."""
    step = -(-len(reader.rows) // ROWS) or 1
    rows = reader.rows[::step]
    if not len(rows):
        return 0.0
    x = rows / scales
    if target.int8_rows:
        x_scales = row_scales(x)
        x = np.clip(np.rint(x / x_scales), -LARGEST, LARGEST) * x_scales
    difference = x @ rounded(reader.weight * scales, target).floats.T - rows @ reader.weight.T
    return float(np.sum(np.square(difference, dtype=np.float64)))
