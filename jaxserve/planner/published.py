"""`plan tables`: published numbers beside ours.

`configs/world/step3.yaml` has the numbers of tables 2 to 7 that Step-3's paper prints; each is
compared with ours, rounded to as many digits. `measurements.yaml` has what others measured, with
sources and with what had to be taken for granted; predictions are a search's, for the one layout
and batch that was measured.
"""

import argparse
import datetime
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from jaxserve.config.shipped import CONFIGS
from jaxserve.config.topology import PlannedMode, topology_of
from jaxserve.planner.assumptions import Formats
from jaxserve.planner.cost import (
    attention_dollars,
    cheapest,
    ffn_dollars,
    minimum_sparsity,
    token_cost,
)
from jaxserve.planner.hardware import load_hardware, read_struct
from jaxserve.planner.layouts import Layout
from jaxserve.planner.models import load_model
from jaxserve.planner.options import acceptance, assumptions
from jaxserve.planner.search import NO_DRAFTS, Searcher
from jaxserve.planner.stages import Calculator
from jaxserve.planner.view import Part, Report, declared, show

CONTEXTS = (8 * 1024, 32 * 1024)
SCOPE = (
    "decode only: costs of output tokens, as the paper has them, without prompts; prices are the "
    "paper's of 2025-07, not verified"
)


class Cell(NamedTuple):
    """A number of the paper, and ours; None where the hardware has no such number."""

    value: float | None
    printed: str

    @property
    def text(self) -> str:
        """Our number with as many digits as the paper prints."""
        if self.value is None:
            return "N/A"
        decimals = len(self.printed.partition("e")[0].partition(".")[2])
        return format(self.value, f".{decimals}{'e' if 'e' in self.printed else 'f'}")

    @property
    def agrees(self) -> bool:
        return self.text == self.printed


class Table(NamedTuple):
    """A table of the paper, recomputed: cells by row and column, without those left blank."""

    name: str
    title: str
    columns: Sequence[str]
    rows: Mapping[str, Mapping[str, Cell]]

    @property
    def part(self) -> Part:
        """Our numbers. The paper's stand under a row that differs."""
        shown = [["", *self.columns]]
        for label, cells in self.rows.items():
            shown.append([label, *(cells[c].text if c in cells else "" for c in self.columns)])
            if wrong := {c: f"{cell.printed} !" for c, cell in cells.items() if not cell.agrees}:
                shown.append(["  the paper", *(wrong.get(c, "") for c in self.columns)])
        return Part(f"{self.name}: {self.title}", shown)


class Printed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table as the paper prints it.

    Attributes:
      rows: numbers of each row, divided by spaces; a dot where a cell is blank.
    """

    title: str
    columns: list[str]
    rows: dict[str, str]


class Paper(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names of models and hardware in the paper, with ours, and its tables."""

    models: dict[str, str]
    hardware: dict[str, str]
    tables: dict[str, Printed]


def tables(folder: Path = CONFIGS) -> list[Table]:
    """Returns tables 2 to 7, and "Text" with the numbers beside the figures.

    Raises:
      ConfigError: a model or hardware file is missing or wrong.
    """
    paper = read_struct(CONFIGS / "world" / "step3.yaml", Paper)
    models = {name: load_model(key, folder) for name, key in paper.models.items()}
    hardware = {name: load_hardware(key, folder=folder) for name, key in paper.hardware.items()}
    step3 = models["Step-3"]

    def peaks(name: str) -> list[float | None]:
        one = hardware[name]
        fp8 = one.flops("fp8") if "fp8" in one.teraflops else None
        return [one.price, one.flops("bfloat16"), fp8, one.bandwidth, one.roofline]

    def dollars(name: str) -> list[float]:
        model, kinds = models[name], hardware.values()
        found = [attention_dollars(model, context, h) for context in CONTEXTS for h in kinds]
        return found + [ffn_dollars(model, h) for h in kinds]

    def beside(name: str) -> list[float]:
        model, cost = models[name], token_cost(models[name], CONTEXTS[0])
        best = [cheapest(model, context, hardware).dollars for context in CONTEXTS]
        return [model.activated / 1e9, *best, cost.attention_flops / cost.cache_bytes]

    ours: dict[str, Callable[[str], Sequence[float | None]]] = {
        "Table 2": lambda name: token_cost(models[name], CONTEXTS[0]),
        "Table 3": lambda name: token_cost(models[name], CONTEXTS[1]),
        "Table 4": peaks,
        "Table 5": lambda n: [hardware[n].dollars_per_flop, hardware[n].dollars_per_byte],
        "Table 6": dollars,
        "Table 7": lambda name: [minimum_sparsity(hardware[name], step3.d_model, step3.layers)],
        "Text": beside,
    }
    found = []
    for name, one in paper.tables.items():
        rows = {}
        for label, printed in one.rows.items():
            cells = zip(one.columns, map(Cell, ours[name](label), printed.split()), strict=True)
            rows[label] = {column: cell for column, cell in cells if cell.printed != "."}
        found.append(Table(name, one.title, one.columns, rows))
    return found


def agreement(found: Sequence[Table]) -> str:
    """Says how many numbers agree with the paper's, and which do not."""
    cells, wrong = 0, []
    for table in found:
        for label, row in table.rows.items():
            cells += len(row)
            wrong += [
                f"  {table.name}, {label}, {column}: {cell.text}, the paper prints {cell.printed}"
                for column, cell in row.items()
                if not cell.agrees
            ]
    agree = f"{cells - len(wrong)} of {cells} printed numbers agree to the printed digits"
    return "\n".join([agree, *wrong])


def report(found: Sequence[Table]) -> Report:
    """Returns all tables, and how many numbers agree."""
    parts = [*(table.part for table in found), Part(lines=[SCOPE, agreement(found)])]
    tree = [
        {
            "scope": SCOPE,
            "name": table.name,
            "title": table.title,
            "rows": {
                label: {column: cell._asdict() for column, cell in row.items()}
                for label, row in table.rows.items()
            },
        }
        for table in found
    ]
    return Report("Step-3's tables, computed and printed", parts, tree)


Count = Annotated[int, Meta(ge=1)]
Quantity = Literal["tokens/s a device", "tokens/s a chip", "ms a token", "µs an attention layer"]
LAYER: Quantity = "µs an attention layer"
WORLD_SCOPE = "decode only: of output tokens, or of attention layers that decode; no prompts"
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
    """Facts that it does not state."""
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
        names = ("mode", "dp", "tp", "lanes", "drafts", "shared_ranks")
        sizes = {name: getattr(self, name) for name in names}
        afd = topology_of(self.mode).has("ffn")
        ep, ffn_tp = (self.ep, self.ffn_tp) if afd else (self.dp, self.tp)
        return Layout(attention=self.hardware, ffn=self.hardware, ep=ep, ffn_tp=ffn_tp, **sizes)


class Compared(NamedTuple):
    """A measurement and our prediction."""

    measurement: Measurement
    predicted: float

    @property
    def error(self) -> float:
        """(predicted − measured) / measured."""
        return self.predicted / self.measurement.measured - 1

    @property
    def speed(self) -> float:
        """Measured over predicted speed."""
        slower = self.measurement.quantity in ("ms a token", LAYER)
        return self.error + 1 if slower else 1 / (self.error + 1)

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
    if one.quantity == LAYER:
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
            f"predicted speed (p10 to p90, median {self.p50:.2f}; `plan tables --world`)"
        )


def speed_range() -> SpeedRange:
    """Returns the range of all published systems. Attention layers alone do not count."""
    speeds = [one.speed for one in compare() if one.measurement.quantity != LAYER]
    return SpeedRange(len(speeds), *map(float, np.percentile(speeds, [10, 50, 90])))


def world_report(found: Sequence[Compared]) -> Report:
    """Report with every measurement, our prediction, the source, and the assumptions."""
    tree = [
        {"scope": WORLD_SCOPE, **msgspec.to_builtins(one.measurement)}
        | {"predicted": one.predicted, "error": one.error}
        for one in found
    ]
    parts = declared("world", found=found, scope=WORLD_SCOPE, summary=summary(found))
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


def run(options: argparse.Namespace) -> None:
    """Shows Step-3's tables or, with --world, what others measured."""
    if options.world:
        show(options, world_report(compare(options.configs)))
    else:
        show(options, report(tables(options.configs)))
