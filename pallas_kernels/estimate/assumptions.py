"""Assumptions behind the estimates, each with its source: `assumptions.yaml` has them.

Read by `model.py` and the planner's `estimate.py`. `python -m pallas_kernels.estimate
--assumptions` prints them.
"""

from pathlib import Path
from typing import Any, NamedTuple

import yaml

from pallas_kernels.estimate.sass import Latencies


class Assumption(NamedTuple):
    """A number, its unit and its source."""

    value: float
    unit: str
    source: str


_TABLE: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
)
ASSUMPTIONS = {name: Assumption(*told) for name, told in _TABLE["numbers"].items()}
_PIPES = {name: tuple(told) for name, told in _TABLE["latencies"].pop("pipes").items()}
LATENCIES = Latencies(**_TABLE["latencies"], pipes=_PIPES)
SOURCES: list[str] = _TABLE["sources"]


def assumed(name: str) -> float:
    """Returns the value of an assumption."""
    return ASSUMPTIONS[name].value
