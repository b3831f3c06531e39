"""Prints published numbers beside ours (`plan tables`), and how fast measured systems were beside
predictions, which `search` and `deploy` print, too.

`configs/world/` has both as data, with their sources: `step3.yaml` and `measurements.yaml` are what
others published, `tables.json` and `predicted.json` what the planner makes of it.
`tests/jaxserve/planner/published.py` computes these two, and a test fails once the planner says
something else.
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from jaxserve.config.shipped import CONFIGS
from jaxserve.planner.hardware import read_json, read_struct
from jaxserve.planner.view import Part, Report, declared, show

SCOPE = (
    "decode only: costs of output tokens, as the paper has them, without prompts; prices are the "
    "paper's of 2025-07, not verified"
)
WORLD_SCOPE = "decode only: of output tokens, or of attention layers that decode; no prompts"


class Cell(msgspec.Struct, frozen=True):
    """A number of the paper, and ours, also with as many digits; None, "N/A": there is none."""

    value: float | None
    ours: str
    printed: str


class Table(msgspec.Struct, frozen=True):
    """A table of the paper, recomputed: cells by row and column, without those left blank."""

    name: str
    title: str
    columns: list[str]
    rows: dict[str, dict[str, Cell]]

    @property
    def part(self) -> Part:
        """Our numbers. The paper's stand under a row that differs."""
        shown = [["", *self.columns]]
        for label, cells in self.rows.items():
            shown.append([label, *(cells[c].ours if c in cells else "" for c in self.columns)])
            wrong = {
                c: f"{cell.printed} !" for c, cell in cells.items() if cell.ours != cell.printed
            }
            if wrong:
                shown.append(["  the paper", *(wrong.get(c, "") for c in self.columns)])
        return Part(f"{self.name}: {self.title}", shown)


class Tables(msgspec.Struct, frozen=True):
    """Step-3's tables 2 to 7, "Text" with the numbers beside its figures, and how many of our
    numbers agree."""

    tables: list[Table]
    agreement: list[str]


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


class Predicted(msgspec.Struct, frozen=True):
    """Predictions of what others measured, by the names of `measurements.yaml`, in its units."""

    speed: SpeedRange
    summary: str
    predicted: dict[str, float]


def speed_range() -> SpeedRange:
    """Returns the range of all published systems. Attention layers alone do not count."""
    return read_json(CONFIGS / "world" / "predicted.json", Predicted).speed


def run(options: argparse.Namespace) -> None:
    """Shows Step-3's tables or, with --world, what others measured.

    Raises:
      ConfigError: a file is missing or wrong.
    """
    folder = options.configs / "world"
    show(options, _world(folder) if options.world else _tables(folder))


def _tables(folder: Path) -> Report:
    found = read_json(folder / "tables.json", Tables)
    parts = [*(table.part for table in found.tables), Part(lines=[SCOPE, *found.agreement])]
    tree = [{"scope": SCOPE, **msgspec.to_builtins(table)} for table in found.tables]
    return Report("Step-3's tables, computed and printed", parts, tree)


def _world(folder: Path) -> Report:
    found, rows = read_json(folder / "predicted.json", Predicted), []
    for one in read_struct(folder / "measurements.yaml", list[dict[str, Any]]):
        predicted = found.predicted[one["name"]]
        rows.append({**one, "predicted": predicted, "error": predicted / one["measured"] - 1})
    parts = declared("world", found=rows, scope=WORLD_SCOPE, summary=found.summary)
    tree = [{"scope": WORLD_SCOPE, **row} for row in rows]
    return Report("What others measured, and what the planner predicts", parts, tree)
