"""How fast systems that others measured were beside what the planner predicts of them.

`configs/measured_speed.json` holds the ranges. `tests/jaxserve/planner/published.py` computes them
from published measurements, and a test fails once the planner predicts something else.
"""

import functools
from typing import NamedTuple

from jaxserve.config.shipped import CONFIGS
from jaxserve.config.topology import PlannedMode
from jaxserve.planner.hardware import read_json


class SpeedRange(NamedTuple):
    """Percentiles of the speed of whole systems that others measured, over the predicted speed."""

    systems: int
    p10: float
    p50: float
    p90: float

    @property
    def text(self) -> str:
        return (
            f"{self.systems} measured systems reached {self.p10:.2f} to {self.p90:.2f} of their "
            f"predicted speed (p10 to p90, median {self.p50:.2f}; docs/measurements/planner.md)"
        )


class MeasuredSpeed(NamedTuple):
    """Ranges of all published systems together, and of those of each mode."""

    systems: SpeedRange
    modes: dict[PlannedMode, SpeedRange]


@functools.cache
def measured_speed() -> MeasuredSpeed:
    """Returns the ranges of published systems. Attention layers alone do not count."""
    return read_json(CONFIGS / "measured_speed.json", MeasuredSpeed)
