"""Corrections of a stage's roofline by measurements: a factor on its bytes, one on its FLOPs, and a
constant.

`measurements.py` fits them, `stages.py` applies them. Knows neither models nor files.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxserve.observe.spans import AFDStage

MeasuredStage = AFDStage | Literal["enter", "leave", "host"]
"""The stages of AFD; a step's first attend, which embeds, too; its end, which is head and sampling;
and the host's time for a step and lane, where that is what lanes wait for."""

APART = 1e-3
"""Share of the largest singular value below which terms (in columns of length 1) are alike."""
PASSES = 30
"""Passes of a fit, each with the weights of the last pass."""
NEAR = 0.2
"""Relative error beyond which a point counts by its error."""
FAR = 3.0
"""Most that a weight differs from what was measured, either way."""


class Terms(NamedTuple):
    """Parts of a stage's time: numbers, or arrays with an entry for each DP group."""

    memory: Any
    """Seconds of bytes that depend on the load, at the memory's peak, or a message's link's."""
    compute: Any
    """Seconds of its FLOPs at the peak."""
    fixed: float = 0.0
    """Seconds of the bytes that are read whatever the load: weights that every row meets."""


class Fit(NamedTuple):
    """measured ≈ constant + memory × `Terms.memory` + compute × `Terms.compute`."""

    constant: float
    """Seconds, `fixed` bytes included; none of the three is below 0."""
    memory: float
    compute: float
    points: int
    error: float
    """Largest |fitted − measured| / measured."""
    determined: bool
    """Whether the points tell the three apart; if not, what lies beyond them is a guess."""
    fixed: float = 0.0
    """`Terms.fixed` of the points, on the mean: another sharding has more or less of it."""

    def seconds(self, terms: Terms) -> Any:
        constant = max(0.0, self.constant + self.memory * (terms.fixed - self.fixed))
        return constant + self.memory * terms.memory + self.compute * terms.compute


def fit(points: Sequence[tuple[Terms, float]]) -> Fit:
    """Returns the non-negative constant and factors of least squared relative error.

    Relative to what was measured, a point that came out short by chance would count more than one
    that came out long, and fits would be too small. So points are weighed by the last pass's fit
    (McCullagh and Nelder, 1989, "Generalized Linear Models", §2.5). A point that is far off, such
    as a load measured while something else ran, counts by its error instead of its error's square
    (Huber, 1964, "Robust estimation of a location parameter").

    Args:
      points: terms, not below 0, and measured seconds, above 0; else raises ValueError.
    """
    if not points or any(seconds <= 0 or min(terms) < 0 for terms, seconds in points):
        raise ValueError(f"points of {points}: seconds must be above 0, and terms not below")
    seconds = np.array([seconds for _, seconds in points])
    columns = np.array([[1.0, *terms[:2]] for terms, _ in points])
    scale, trust, best = seconds, np.ones(len(points)), np.zeros(3)
    for _ in range(PASSES):
        weights = np.sqrt(trust) / scale
        best = _non_negative(columns * weights[:, None], seconds * weights)
        fitted = columns @ best
        scale = np.clip(fitted, seconds / FAR, seconds * FAR)
        trust = NEAR / np.maximum(np.abs(fitted - seconds) / scale, NEAR)
    error = float(np.max(np.abs(columns @ best / seconds - 1)))
    relative = columns / seconds[:, None]
    used = [index for index in range(3) if relative[:, index].any()]
    relative = relative[:, used] / np.linalg.norm(relative[:, used], axis=0)
    values = np.linalg.svd(relative, compute_uv=False)
    determined = len(points) >= len(used) and bool(values[-1] > APART * values[0])
    fixed = float(np.mean([terms.fixed for terms, _ in points]))
    constant, memory, compute = map(float, best)
    return Fit(constant, memory, compute, len(points), error, determined, fixed)


def _non_negative(columns: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Non-negative least squares: with three unknowns, the best of all sets of them that may be
    above 0. Of sets that are equally good, the smallest: then the others are not needed."""
    lengths = np.linalg.norm(columns, axis=0)
    used = [index for index in range(len(lengths)) if lengths[index]]
    best, least = np.zeros(len(lengths)), np.inf
    for count in range(1, len(used) + 1):
        for chosen in map(list, itertools.combinations(used, count)):
            found = np.linalg.lstsq(columns[:, chosen] / lengths[chosen], wanted)[0]
            found = found / lengths[chosen]
            rest = float(np.sum((columns[:, chosen] @ found - wanted) ** 2))
            if found.min() >= 0 and rest < least * (1 - 1e-6) - 1e-12:
                best, least = np.zeros(len(lengths)), rest
                best[chosen] = found
    return best


class FitKey(NamedTuple):
    """Identifies a fit: the stage, hardware, model and formats that it corrects."""

    stage: MeasuredStage
    hardware: str
    """Name of the hardware; for the link, of the sending hardware."""
    model: str
    format: str
    """The number formats that matter to the stage, as `Formats.of` names them."""
    layers: int
    """Index of the group of equal layers in the model; 0 if all layers are equal."""


class Calibration:
    """Fits of measured stages. Without any, stages take what rooflines say."""

    def __init__(self, fits: Mapping[FitKey, Fit]):
        self.fits = fits

    def seconds(self, key: FitKey, terms: Terms, roof: Any) -> Any:
        """Seconds of a stage, a number or an array. Without a fit of its own, a stage takes that of
        other layers of the model, a step's first attention that of the others, and any stage
        without these what rooflines say (`roof`)."""
        if not self.fits:
            return roof
        others = (one for at, one in self.fits.items() if at._replace(layers=key.layers) == key)
        found = self.fits.get(key) or next(others, None)
        if found is None and key.stage == "enter":
            return self.seconds(key._replace(stage="attend"), terms, roof)
        return roof if found is None else found.seconds(terms)


NOTHING = Calibration({})


class Asked(Calibration):
    """Corrects nothing, and records what a fit is made of by key: terms and roofline seconds."""

    def __init__(self) -> None:
        super().__init__({})
        self.terms: dict[FitKey, tuple[Terms, float]] = {}

    def seconds(self, key: FitKey, terms: Terms, roof: Any) -> Any:
        """Returns the roofline's seconds unchanged, and records terms and seconds."""
        memory, compute = float(np.max(terms.memory)), float(np.max(terms.compute))
        self.terms[key] = Terms(memory, compute, terms.fixed), float(np.max(roof))
        return roof
