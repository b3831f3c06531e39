"""The planner against the world: what others measured and published, and what we predict for it.

Called by `plan.py tables --world`. The measurements, their sources and what had to be taken for
granted are data (`configs/world/measurements.yaml`); the predictions are those of a search, for the
one layout and batch that was measured.
"""

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from jaxserve.config.shipped import CONFIGS
from jaxserve.config.topology import PlannedMode, topology_of
from jaxserve.planner.assumptions import Formats
from jaxserve.planner.hardware import load_hardware, read_struct
from jaxserve.planner.layouts import Layout
from jaxserve.planner.models import load_model
from jaxserve.planner.options import acceptance, assumptions
from jaxserve.planner.search import NO_DRAFTS, Searcher
from jaxserve.planner.stages import Calculator
from jaxserve.planner.view import Part, Report

Count = Annotated[int, Meta(ge=1)]
Quantity = Literal["tokens/s a device", "tokens/s a chip", "ms a token", "µs an attention layer"]
SCOPE = "decode only: of output tokens, or of attention layers that decode; no prompts"
LARGE = 0.35
"""Relative errors above this one need a reason."""


class Measurement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One published number."""

    name: str
    quantity: Quantity
    measured: Annotated[float, Meta(gt=0)]
    source: str
    date: datetime.date
    """Date of the source."""
    model: str
    hardware: str
    mode: PlannedMode
    batch: Count
    """Sequences a DP group and lane."""
    context: Count
    """Mean tokens of a sequence."""
    given: str
    """Facts that the source states."""
    taken: str
    """Facts that it does not state, and we had to take."""
    formats: Formats
    dp: Count = 1
    tp: Count = 1
    ep: int = 0
    """Ranks of AFD; colocated, experts are divided over the DP groups."""
    ffn_tp: Count = 1
    lanes: Count = 1
    shared_ranks: int = 0
    drafts: int = 0
    acceptance: str = ""
    assume: list[str] = []
    """Options of `plan search --assume`."""
    fitted: bool = False
    """Whether the planner's constants were fitted to it."""
    why: str = ""
    """Why the prediction is far off, where it is."""

    @property
    def layout(self) -> Layout:
        """The devices in the planner's words."""
        afd = topology_of(self.mode).has("ffn")
        return Layout(
            mode=self.mode,
            attention=self.hardware,
            ffn=self.hardware,
            dp=self.dp,
            tp=self.tp,
            ep=self.ep if afd else self.dp,
            ffn_tp=self.ffn_tp if afd else self.tp,
            lanes=self.lanes,
            drafts=self.drafts,
            shared_ranks=self.shared_ranks,
        )


class Compared(NamedTuple):
    """A measurement and our prediction."""

    measurement: Measurement
    predicted: float

    @property
    def error(self) -> float:
        """(predicted − measured) / measured."""
        return self.predicted / self.measurement.measured - 1

    @property
    def unexplained(self) -> bool:
        """Whether the prediction is far off without a stated reason."""
        return abs(self.error) > LARGE and not self.measurement.why


def read_measurements(folder: Path = CONFIGS) -> list[Measurement]:
    """The published numbers.

    Raises:
      ConfigError: the file is missing or wrong.
    """
    return read_struct(folder / "world" / "measurements.yaml", list[Measurement])


def predict(one: Measurement, folder: Path = CONFIGS) -> float:
    """Our number, in the measurement's unit.

    Raises:
      ConfigError: its model, hardware or assumptions are unknown.
    """
    hardware = load_hardware(one.hardware, folder=folder)
    calculator = Calculator(
        load_model(one.model, folder), one.context, one.formats, assumptions(one.assume)
    )
    if one.quantity == "µs an attention layer":
        group = max(calculator.model.attention, key=lambda each: each.layers)
        return calculator.attend(group, hardware, one.batch, one.tp).seconds * 1e6
    accepted = acceptance(one.acceptance, one.drafts) if one.drafts else NO_DRAFTS
    named = {one.hardware: hardware}
    plan = Searcher(calculator, named, named, accepted).evaluate(one.layout, one.batch)
    if one.quantity == "ms a token":
        return plan.tpot * 1e3
    chips = hardware.jax_devices if one.quantity == "tokens/s a chip" else 1
    return plan.tokens_per_device * chips


def compare(folder: Path = CONFIGS) -> list[Compared]:
    """Predicts every published measurement."""
    return [Compared(one, predict(one, folder)) for one in read_measurements(folder)]


def world_report(found: Sequence[Compared]) -> Report:
    """Report with every measurement, our prediction, the source, and the assumptions."""
    rows = [["", "quantity", "measured", "predicted", "error"]]
    notes = [SCOPE]
    for each in found:
        one = each.measurement
        mark = " fitted" if one.fitted else ""
        numbers = [f"{one.measured:g}", f"{each.predicted:.4g}", f"{each.error:+.0%}{mark}"]
        rows.append([one.name, one.quantity, *numbers])
        notes.append(f"{one.name}: {one.source}, {one.date}")
        notes += [f"  given: {one.given}", f"  taken: {one.taken}"]
        if one.why:
            notes.append(f"  {each.error:+.0%}: {one.why}")
    parts = [
        Part(rows=rows, lines=[summary(found)]),
        Part("Sources, and what was taken for granted", lines=notes),
    ]
    tree = [
        {
            "scope": SCOPE,
            **msgspec.to_builtins(one.measurement),
            "predicted": one.predicted,
            "error": one.error,
        }
        for one in found
    ]
    return Report("What others measured, and what the planner predicts", parts, tree)


def summary(found: Sequence[Compared]) -> str:
    """Says the mean error of the rows that nothing was fitted to, and how many are far off."""
    free = [abs(one.error) for one in found if not one.measurement.fitted]
    far = [one for one in found if abs(one.error) > LARGE]
    return (
        f"mean |error| {sum(free) / len(free):.0%} of {len(free)} numbers that nothing was fitted "
        f"to; {len(far)} above {LARGE:.0%}, {sum(one.unexplained for one in far)} of them "
        "without a reason"
    )
