"""Linear corrections from a stage's roofline prediction to its measured time.

`measurements.py` fits them, `stages.py` applies them. Knows neither models nor files.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxserve.observe.timeline import AFDStage

SPREAD = 1.2
"""Predictions within this ratio of each other determine a factor only, not a constant."""


class Fit(NamedTuple):
    """measured ≈ constant + scale × predicted."""

    constant: float
    """Seconds, not below 0."""
    scale: float
    points: int
    error: float
    """Largest |fitted − measured| / measured."""


def fit(points: Sequence[tuple[float, float]]) -> Fit:
    """The line through (predicted, measured) seconds of least relative squared error.

    A line that would fall, or start below 0, is replaced by the best one through 0.

    Raises:
      ValueError: there is no point, or a number is not above 0.
    """
    if not points or min(min(point) for point in points) <= 0:
        raise ValueError(f"points of {points}: all seconds must be above 0")
    constant, scale = _line(points)
    if constant < 0 or scale <= 0:
        constant, scale = 0.0, _factor(points)
    errors = [abs(constant + scale * x - y) / y for x, y in points]
    return Fit(constant, scale, len(points), max(errors))


def _factor(points: Sequence[tuple[float, float]]) -> float:
    """Minimises Σ (s·x/y − 1)²."""
    ratios = [x / y for x, y in points]
    return sum(ratios) / sum(ratio * ratio for ratio in ratios)


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Minimises Σ ((c + s·x)/y − 1)²."""
    xs = [x for x, _ in points]
    if max(xs) < SPREAD * min(xs):
        return 0.0, _factor(points)
    one = sum(1 / y**2 for _, y in points)
    x1 = sum(x / y**2 for x, y in points)
    xx = sum(x * x / y**2 for x, y in points)
    y1 = sum(1 / y for _, y in points)
    xy = sum(x / y for x, y in points)
    determinant = one * xx - x1 * x1
    return (xx * y1 - x1 * xy) / determinant, (one * xy - x1 * y1) / determinant


class Calibration(NamedTuple):
    """Fits by stage and hardware name; for the link, the name of the sending hardware."""

    fits: Mapping[tuple[AFDStage, str], Fit]

    def correct(self, stage: AFDStage, hardware: str, seconds: Any) -> Any:
        """Corrects predicted seconds, a number or an array; without a fit they are unchanged."""
        found = self.fits.get((stage, hardware))
        return seconds if found is None else found.constant + found.scale * seconds


NOTHING = Calibration({})
