"""Straight lines from what a roofline says of a stage to what was measured of it.

`measurements.py` makes them, `stages.py` applies them. Knows neither models nor files.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

StageName = Literal["attend", "dispatch", "ffn", "combine"]

SPREAD = 1.2
"""Predictions that lie closer together than this ratio give a factor and no constant."""


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
    """Fits by stage and the name of the hardware that runs it; for the link, that sends."""

    fits: Mapping[tuple[StageName, str], Fit]

    def correct(self, stage: StageName, hardware: str, seconds: Any) -> Any:
        """Predicted seconds, a number or an array, as the measurements would have them."""
        found = self.fits.get((stage, hardware))
        return seconds if found is None else found.constant + found.scale * seconds


NOTHING = Calibration({})
