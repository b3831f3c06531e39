"""Step-3's tables 2 to 7 and the data of its figures 1 to 5, from model and hardware files alone,
each number beside the printed one (`configs/world/step3.yaml`). Called by `plan.py` and
`figures.py`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from jaxserve.config.shipped import CONFIGS
from jaxserve.planner.cost import (
    arithmetic_intensity,
    attention_dollars,
    cheapest,
    ffn_dollars,
    minimum_sparsity,
    pareto,
    token_cost,
    training_dollars,
)
from jaxserve.planner.hardware import Hardware, load_hardware, read_struct
from jaxserve.planner.models import CostModel, load_model

K = 1024
CONTEXTS = (8 * K, 32 * K)
CURVE = tuple(range(8 * K, 32 * K + 1, 4 * K))
"""Contexts of the figures' curves."""
GQA = ("Qwen3 MoE", "Qwen3 32B", "ERNIE 4.5", "Pangu Pro MoE")

Value = float | None
"""None: the hardware has no such number. True and False: yes, and an empty cell."""


class Cell(msgspec.Struct, frozen=True):
    """One number, and the paper's value for it."""

    value: float
    text: str
    """The number, formatted with as many digits as the paper prints."""
    printed: str = ""
    """The paper's value; empty where it only draws it, or gives none."""

    @property
    def difference(self) -> float | None:
        """Relative to the printed number."""
        try:
            return self.value / float(self.printed) - 1
        except ValueError:
            return None

    @property
    def agrees(self) -> bool:
        """Whether it rounds to the printed digits; true where nothing is printed."""
        return not self.printed or self.text == self.printed

    @property
    def compared(self) -> str:
        """The difference from the printed number, marked where the digits differ."""
        if not self.printed:
            return ""
        relative = "" if self.difference is None else f"{100 * self.difference:+.2f}%"
        return relative if self.agrees else f"{relative} !"


class Table(msgspec.Struct, frozen=True):
    """Rows of cells under headings."""

    name: str
    title: str
    columns: list[str]
    rows: dict[str, list[Cell]]

    @property
    def text_rows(self) -> list[list[str]]:
        """A heading and our rows; under every one with printed cells the paper's and the
        difference."""
        rows = [["", *self.columns]]
        for label, cells in self.rows.items():
            rows.append([label, *(cell.text for cell in cells)])
            if any(cell.printed for cell in cells):
                rows.append(["  paper", *(cell.printed for cell in cells)])
                rows.append(["  difference", *(cell.compared for cell in cells)])
        return rows

    @property
    def tree(self) -> dict[str, Any]:
        """The table for `--json`."""

        def cell(one: Cell) -> dict[str, Any]:
            return {
                "value": one.value,
                "printed": one.printed or None,
                "difference": one.difference if one.printed else None,
                "agrees": one.agrees,
            }

        rows = {
            label: dict(zip(self.columns, map(cell, cells), strict=True))
            for label, cells in self.rows.items()
        }
        return {"name": self.name, "title": self.title, "rows": rows}


def agreement(tables: Sequence[Table]) -> str:
    """Says how many cells agree with the paper, and which do not."""
    placed = [
        (f"{table.name}, {label}, {column}", cell)
        for table in tables
        for label, cells in table.rows.items()
        for column, cell in zip(table.columns, cells, strict=True)
        if cell.printed
    ]
    wrong = [
        f"  {place}: {cell.text}, the paper prints {cell.printed}"
        for place, cell in placed
        if not cell.agrees
    ]
    agree = f"{len(placed) - len(wrong)} of {len(placed)} printed cells agree"
    return "\n".join([f"{agree} to the printed digits", *wrong])


class Paper(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The paper's names of models and hardware, with ours, and the cells that it prints."""

    models: dict[str, str]
    hardware: dict[str, str]
    cells: dict[str, dict[str, str]]


class Sources(msgspec.Struct, frozen=True):
    """Models and hardware by the paper's names, and its cells."""

    models: dict[str, CostModel]
    hardware: dict[str, Hardware]
    cells: dict[str, dict[str, str]]

    def table(
        self,
        name: str,
        title: str,
        columns: Iterable[str],
        rows: Mapping[str, Sequence[Value]],
        digits: str = ".2e",
    ) -> Table:
        """Makes a table.

        Args:
          digits: the format of every column, or one for each.
        """
        made = {}
        for label, values in rows.items():
            row = self.cells.get(name, {}).get(label, ". " * len(values)).split()
            forms = digits.split() if " " in digits else [digits] * len(values)
            made[label] = [
                _cell(value, "" if printed == "." else printed, form)
                for value, printed, form in zip(values, row, forms, strict=True)
            ]
        return Table(name, title, list(columns), made)


def load_sources(folder: Path = CONFIGS) -> Sources:
    """The paper's models and hardware.

    Raises:
      ConfigError: one of the files is missing or wrong.
    """
    paper = read_struct(CONFIGS / "world" / "step3.yaml", Paper)
    return Sources(
        {name: load_model(key, folder) for name, key in paper.models.items()},
        {name: load_hardware(key, folder=folder) for name, key in paper.hardware.items()},
        paper.cells,
    )


def _cell(value: Value, printed: str, digits: str) -> Cell:
    """A cell. `digits` "brief" are as many as the paper prints, or none."""
    if value is None or isinstance(value, bool):
        text = {None: "N/A", True: "yes", False: ""}[value]
    elif digits == "brief":
        text = f"{value:.1f}" if "." in printed else f"{value:.0f}"
    else:
        text = format(value, digits)
    return Cell(float(value or 0) if isinstance(value, bool | None) else value, text, printed)


def tables(sources: Sources) -> list[Table]:
    """Tables 2 to 7."""
    models, hardware, table = sources.models, sources.hardware, sources.table
    costs = ["cache bytes", "attention FLOPs", "linear FLOPs", "FFN FLOPs"]
    step3 = models["Step-3"]
    width = f"width {step3.d_model}, {step3.layers} layers"

    def tokens(name: str, context: int) -> Table:
        title = f"a decoded token at a context of {context // K}K, 8-bit cache"
        return table(name, title, costs, {n: token_cost(m, context) for n, m in models.items()})

    def of_hardware(values: Callable[[Hardware], Sequence[Value]]) -> dict[str, Sequence[Value]]:
        return {name: values(each) for name, each in hardware.items()}

    def peaks(one: Hardware) -> Sequence[Value]:
        fp8 = one.flops("fp8") if "fp8" in one.teraflops else None
        return one.price, one.flops("bfloat16"), fp8, one.bandwidth, one.roofline

    def dollars(model: CostModel) -> list[float]:
        found = [attention_dollars(model, c, h) for c in CONTEXTS for h in hardware.values()]
        return found + [ffn_dollars(model, h) for h in hardware.values()]

    return [
        tokens("Table 2", CONTEXTS[0]),
        tokens("Table 3", CONTEXTS[1]),
        table(
            "Table 4",
            "accelerators (read from the files, but for the roofline)",
            ["USD/hour", "BF16 FLOP/s", "FP8 FLOP/s", "bytes/s", "roofline"],
            of_hardware(peaks),
            "g .2e .2e .2e .0f",
        ),
        table(
            "Table 5",
            "unit costs at full use, USD",
            ["a FLOP", "a byte"],
            of_hardware(lambda one: (one.dollars_per_flop, one.dollars_per_byte)),
        ),
        table(
            "Table 6",
            "USD a million tokens: attention (A) and FFN",
            [f"{part} {name}" for part in ("A 8K", "A 32K", "FFN") for name in hardware],
            {name: dollars(model) for name, model in models.items()},
            ".3f",
        ),
        table(
            "Table 7",
            f"minimum sparsity of experts, {width}",
            ["minimum S"],
            of_hardware(lambda one: [minimum_sparsity(one, step3.d_model, step3.layers)]),
            ".3f",
        ),
    ]


def figures(sources: Sources) -> list[Table]:
    """The data of figures 1 to 5."""
    models, hardware, table = sources.models, sources.hardware, sources.table

    def decoding(model: CostModel, context: int, one: Hardware) -> float:
        return attention_dollars(model, context, one) + ffn_dollars(model, one)

    def best(model: CostModel, context: int) -> float:
        return cheapest(model, context, hardware).dollars

    def own[Row](names: Sequence[str], row: Callable[[CostModel], Row]) -> dict[str, Row]:
        return {name: row(models[name]) for name in names}

    points = {name: (m.activated / 1e9, best(m, CONTEXTS[0])) for name, m in models.items()}
    fronts = [pareto(points[name] for name in names) for names in (tuple(points), GQA)]
    on_fronts = {
        name: (*point, point in fronts[0], name in GQA and point in fronts[1])
        for name, point in points.items()
    }

    def dollars(model: CostModel) -> list[float]:
        found = []
        for context in CONTEXTS:
            found += [decoding(model, context, one) for one in hardware.values()]
            found.append(best(model, context))
        return found

    def work(model: CostModel) -> list[Value]:
        ends = [token_cost(model, context) for context in CONTEXTS]
        values = [value for cost in ends for value in (cost.cache_bytes, cost.attention_flops)]
        return [*values, arithmetic_intensity(model, CONTEXTS[0])]

    curve = [f"{context // K}K" for context in CURVE]
    hybrids, ascend = ("MM M1", "Llama 4 M", "Step-3"), hardware["910B"]
    empty: list[Value] = [False] * 4
    rooflines = {name: [*empty, one.roofline] for name, one in hardware.items()}
    return [
        table(
            "Figure 1",
            "activated parameters (with the head, without the embedding) and the cheapest "
            "deployment at 8K, AFD on any hardware",
            ["activated B", "USD/M tokens", "on the front", "on GQA's front"],
            on_fronts,
            "brief .3f g g",
        ),
        table(
            "Figure 2",
            "USD a million tokens, attention and FFN together",
            [f"{context // K}K {name}" for context in CONTEXTS for name in (*hardware, "AFD")],
            own(("Qwen3 32B", "Qwen3 MoE", "DSv3", "Step-3"), dollars),
            ".3f",
        ),
        table(
            "Figure 3a",
            "KV cache and states, bytes",
            curve,
            own(hybrids, lambda model: [token_cost(model, c).cache_bytes for c in CURVE]),
        ),
        table(
            "Figure 3b",
            "USD a million tokens on H800",
            curve,
            own(hybrids, lambda model: [decoding(model, c, hardware["H800"]) for c in CURVE]),
            ".3f",
        ),
        table(
            "Figure 4",
            "USD a million tokens on 910B",
            ["decode 8K", "decode 32K", "train"],
            own(
                ("Step-3", "Pangu Pro MoE"),
                lambda model: [
                    *(decoding(model, context, ascend) for context in CONTEXTS),
                    training_dollars(model, ascend),
                ],
            ),
            ".3f",
        ),
        table(
            "Figure 5",
            "attention's FLOPs against its bytes, and the hardware's rooflines",
            ["bytes 8K", "FLOPs 8K", "bytes 32K", "FLOPs 32K", "FLOPs a byte"],
            own(("DSv3", "Qwen3 MoE", "Step-3"), work) | rooflines,
            ".2e .2e .2e .2e .0f",
        ),
    ]
