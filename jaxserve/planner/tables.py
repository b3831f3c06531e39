"""Step-3's tables 2 to 7 and the numbers beside its figures, from model and hardware files.

Called by `plan tables`. `configs/world/step3.yaml` holds the numbers that the paper prints; each is
compared with ours, rounded to as many digits.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from jaxserve.config.shipped import CONFIGS
from jaxserve.planner import world
from jaxserve.planner.cost import (
    arithmetic_intensity,
    attention_dollars,
    cheapest,
    ffn_dollars,
    minimum_sparsity,
    token_cost,
)
from jaxserve.planner.hardware import Hardware, load_hardware, read_struct
from jaxserve.planner.models import CostModel, load_model
from jaxserve.planner.view import Part, Report, show

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
        """True if both are equal to the printed digits."""
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
            wrong = {c: f"{cell.printed} !" for c, cell in cells.items() if not cell.agrees}
            if wrong:
                shown.append(["  the paper", *(wrong.get(c, "") for c in self.columns)])
        return Part(f"{self.name}: {self.title}", shown)


class Paper(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names of models and hardware in the paper, with ours, and its numbers by table and row."""

    models: dict[str, str]
    hardware: dict[str, str]
    cells: dict[str, dict[str, str]]


def tables(folder: Path = CONFIGS) -> list[Table]:
    """Returns tables 2 to 7, and "Text" with the numbers beside the figures.

    Raises:
      ConfigError: a model or hardware file is missing or wrong.
    """
    paper = read_struct(CONFIGS / "world" / "step3.yaml", Paper)
    models = {name: load_model(key, folder) for name, key in paper.models.items()}
    hardware = {name: load_hardware(key, folder=folder) for name, key in paper.hardware.items()}
    step3 = models["Step-3"]

    def table[Row](
        name: str,
        title: str,
        columns: Sequence[str],
        rows: Mapping[str, Row],
        values: Callable[[Row], Sequence[float | None]],
    ) -> Table:
        made = {}
        for label, printed in paper.cells[name].items():
            cells = map(Cell, values(rows[label]), printed.split())
            named = zip(columns, cells, strict=True)
            made[label] = {column: cell for column, cell in named if cell.printed != "."}
        return Table(name, title, columns, made)

    def peaks(one: Hardware) -> list[float | None]:
        fp8 = one.flops("fp8") if "fp8" in one.teraflops else None
        return [one.price, one.flops("bfloat16"), fp8, one.bandwidth, one.roofline]

    def dollars(model: CostModel) -> list[float]:
        found = [attention_dollars(model, c, h) for c in CONTEXTS for h in hardware.values()]
        return found + [ffn_dollars(model, h) for h in hardware.values()]

    def beside(model: CostModel) -> list[float]:
        best = [cheapest(model, context, hardware).dollars for context in CONTEXTS]
        return [model.activated / 1e9, *best, arithmetic_intensity(model, CONTEXTS[0])]

    costs = ["cache bytes", "attention FLOPs", "linear FLOPs", "FFN FLOPs"]
    peak = ["USD/hour", "BF16 FLOP/s", "FP8 FLOP/s", "bytes/s", "roofline"]
    parts = [f"{part} {name}" for part in ("A 8K", "A 32K", "FFN") for name in hardware]
    text = ["activated B", "USD/M tokens at 8K, AFD", "at 32K", "FLOPs a byte of cache"]
    width = f"width {step3.d_model}, {step3.layers} layers"
    return [
        *(
            table(
                name,
                f"a decoded token at a context of {context // 1024}K, 8-bit cache",
                costs,
                models,
                lambda model, context=context: token_cost(model, context),  # type: ignore[misc]
            )
            for name, context in zip(("Table 2", "Table 3"), CONTEXTS, strict=True)
        ),
        table("Table 4", "accelerators, read from their files", peak, hardware, peaks),
        table(
            "Table 5",
            "unit costs at full use, USD",
            ["a FLOP", "a byte"],
            hardware,
            lambda one: (one.dollars_per_flop, one.dollars_per_byte),
        ),
        table("Table 6", "USD a million tokens: attention (A) and FFN", parts, models, dollars),
        table(
            "Table 7",
            f"minimum sparsity of experts, {width}",
            ["minimum S"],
            hardware,
            lambda one: [minimum_sparsity(one, step3.d_model, step3.layers)],
        ),
        table("Text", "the numbers beside figures 1, 2 and 5", text, models, beside),
    ]


def agreement(found: Sequence[Table]) -> str:
    """Says how many numbers agree with the paper's, and which do not."""
    cells = [
        (f"{table.name}, {label}, {column}", cell)
        for table in found
        for label, row in table.rows.items()
        for column, cell in row.items()
    ]
    wrong = [
        f"  {place}: {cell.text}, the paper prints {cell.printed}"
        for place, cell in cells
        if not cell.agrees
    ]
    agree = f"{len(cells) - len(wrong)} of {len(cells)} printed numbers agree"
    return "\n".join([f"{agree} to the printed digits", *wrong])


def report(found: Sequence[Table]) -> Report:
    """Returns all tables, and how many numbers agree."""
    parts = [table.part for table in found]
    parts.append(Part(lines=[SCOPE, agreement(found)]))
    tree: list[dict[str, Any]] = [
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


def run(options: argparse.Namespace) -> None:
    """Shows Step-3's tables or, with --world, what others measured."""
    if options.world:
        show(options, world.world_report(world.compare(options.configs)))
    else:
        show(options, report(tables(options.configs)))
