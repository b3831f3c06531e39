"""Step-3's tables 2 to 7 and the data of its figures 1 to 5, from model and hardware files alone,
each number beside the printed one. Called by `plan.py tables` and `figures.py`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from jaxserve.config.shipped import CONFIGS
from jaxserve.planner import paper
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
from jaxserve.planner.hardware import Hardware, load_hardware
from jaxserve.planner.models import CostModel, load_model

K = 1024
CONTEXTS = (8 * K, 32 * K)
CURVE = tuple(range(8 * K, 32 * K + 1, 4 * K))
"""Contexts of the figures' curves."""

GQA = ("Qwen3 MoE", "Qwen3 32B", "ERNIE 4.5", "Pangu Pro MoE")


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


class Table(msgspec.Struct, frozen=True):
    """Rows of cells under headings."""

    name: str
    title: str
    columns: list[str]
    rows: dict[str, list[Cell]]

    @property
    def compared(self) -> list[Cell]:
        """The cells that the paper prints."""
        return [cell for row in self.rows.values() for cell in row if cell.printed]


class Sources(msgspec.Struct, frozen=True):
    """The inputs of the tables, by the paper's names."""

    models: dict[str, CostModel]
    hardware: dict[str, Hardware]


def load_sources(folder: Path = CONFIGS) -> Sources:
    """The paper's models and hardware.

    Raises:
      ConfigError: one of the files is missing or wrong.
    """
    return Sources(
        {name: load_model(key, folder) for name, key in paper.MODELS.items()},
        {name: load_hardware(key, folder=folder) for name, key in paper.HARDWARE.items()},
    )


def tables(sources: Sources) -> list[Table]:
    """Tables 2 to 7."""
    return [
        _token_table("Table 2", sources, CONTEXTS[0], paper.TABLE_2),
        _token_table("Table 3", sources, CONTEXTS[1], paper.TABLE_3),
        _hardware_table(sources),
        _unit_table(sources),
        _cost_table(sources),
        _sparsity_table(sources),
    ]


def figures(sources: Sources) -> list[Table]:
    """The data of figures 1 to 5."""
    return [
        _figure_1(sources),
        _figure_2(sources),
        *_figure_3(sources),
        _figure_4(sources),
        _figure_5(sources),
    ]


def _cells(values: Sequence[float], printed: str, number_format: str) -> list[Cell]:
    parts = printed.split() if printed else [""] * len(values)
    return [
        Cell(value, format(value, number_format), text)
        for value, text in zip(values, parts, strict=True)
    ]


def _token_table(name: str, sources: Sources, context: int, printed: Mapping[str, str]) -> Table:
    rows = {
        label: _cells(token_cost(model, context), printed[label], ".2e")
        for label, model in sources.models.items()
    }
    return Table(
        name,
        f"a decoded token at a context of {context // K}K, 8-bit cache",
        ["cache bytes", "attention FLOPs", "linear FLOPs", "FFN FLOPs"],
        rows,
    )


def _hardware_table(sources: Sources) -> Table:
    rows = {}
    for label, hardware in sources.hardware.items():
        price, bfloat16, fp8, bandwidth, roofline = paper.TABLE_4[label].split()
        flops = hardware.teraflops.get("fp8")
        rows[label] = [
            Cell(hardware.price, f"{hardware.price:g}", price),
            *_cells([hardware.flops("bfloat16")], bfloat16, ".2e"),
            Cell(flops * 1e12, f"{flops * 1e12:.2e}", fp8) if flops else Cell(0.0, "N/A", fp8),
            *_cells([hardware.bandwidth], bandwidth, ".2e"),
            *_cells([hardware.roofline], roofline, ".0f"),
        ]
    columns = ["USD/hour", "BF16 FLOP/s", "FP8 FLOP/s", "bytes/s", "roofline"]
    return Table(
        "Table 4", "accelerators (read from the files, but for the roofline)", columns, rows
    )


def _unit_table(sources: Sources) -> Table:
    rows = {
        label: _cells((h.dollars_per_flop, h.dollars_per_byte), paper.TABLE_5[label], ".2e")
        for label, h in sources.hardware.items()
    }
    return Table("Table 5", "unit costs at full use, USD", ["a FLOP", "a byte"], rows)


def _cost_table(sources: Sources) -> Table:
    hardware = sources.hardware
    rows = {}
    for label, model in sources.models.items():
        values = [
            attention_dollars(model, context, h) for context in CONTEXTS for h in hardware.values()
        ]
        values += [ffn_dollars(model, h) for h in hardware.values()]
        rows[label] = _cells(values, paper.TABLE_6[label], ".3f")
    columns = [f"{part} {name}" for part in ("A 8K", "A 32K", "FFN") for name in hardware]
    return Table("Table 6", "USD a million tokens: attention (A) and FFN", columns, rows)


def _sparsity_table(sources: Sources) -> Table:
    step3 = sources.models["Step-3"]
    rows = {
        label: _cells(
            [minimum_sparsity(h, step3.d_model, step3.layers)], paper.TABLE_7[label], ".3f"
        )
        for label, h in sources.hardware.items()
    }
    title = f"minimum sparsity of experts, width {step3.d_model}, {step3.layers} layers"
    return Table("Table 7", title, ["minimum S"], rows)


def _figure_1(sources: Sources) -> Table:
    rows = {}
    points = {}
    for label, model in sources.models.items():
        activated = model.activated / 1e9
        printed = paper.ACTIVATED.get(label, "")
        text = f"{activated:.1f}" if "." in printed else f"{activated:.0f}"
        cost = cheapest(model, CONTEXTS[0], sources.hardware).dollars
        points[label] = (activated, cost)
        rows[label] = [Cell(activated, text, printed), Cell(cost, f"{cost:.3f}")]
    for names in (tuple(points), GQA):
        front = pareto(points[name] for name in names)
        for label in rows:
            on = points[label] in front and label in names
            rows[label].append(Cell(float(on), "yes" if on else ""))
    return Table(
        "Figure 1",
        "activated parameters (with the head, without the embedding) and the cheapest deployment "
        "at 8K, AFD on any hardware",
        ["activated B", "USD/M tokens", "on the front", "on GQA's front"],
        rows,
    )


def _figure_2(sources: Sources) -> Table:
    rows = {}
    for label in ("Qwen3 32B", "Qwen3 MoE", "DSv3", "Step-3"):
        model = sources.models[label]
        printed = paper.FIGURE_2.get(label, " ").split(" ")
        row = []
        for context, best in zip(CONTEXTS, printed, strict=True):
            for hardware in sources.hardware.values():
                both = attention_dollars(model, context, hardware) + ffn_dollars(model, hardware)
                row.append(Cell(both, f"{both:.3f}"))
            choice = cheapest(model, context, sources.hardware)
            row.append(Cell(choice.dollars, f"{choice.dollars:.3f}", best))
        rows[label] = row
    names = [*sources.hardware, "AFD"]
    columns = [f"{context // K}K {name}" for context in CONTEXTS for name in names]
    return Table("Figure 2", "USD a million tokens, attention and FFN together", columns, rows)


def _figure_3(sources: Sources) -> list[Table]:
    h800 = sources.hardware["H800"]
    caches: dict[str, list[Cell]] = {}
    costs: dict[str, list[Cell]] = {}
    for label in ("MM M1", "Llama 4 M", "Step-3"):
        model = sources.models[label]
        sizes = [token_cost(model, context).cache_bytes for context in CURVE]
        both = [attention_dollars(model, c, h800) + ffn_dollars(model, h800) for c in CURVE]
        caches[label] = _cells(sizes, "", ".2e")
        costs[label] = _cells(both, "", ".3f")
    columns = [f"{context // K}K" for context in CURVE]
    return [
        Table("Figure 3a", "KV cache and states, bytes", columns, caches),
        Table("Figure 3b", "USD a million tokens on H800", columns, costs),
    ]


def _figure_4(sources: Sources) -> Table:
    ascend = sources.hardware["910B"]
    rows = {}
    for label in ("Step-3", "Pangu Pro MoE"):
        model = sources.models[label]
        decode = [
            attention_dollars(model, c, ascend) + ffn_dollars(model, ascend) for c in CONTEXTS
        ]
        rows[label] = _cells([*decode, training_dollars(model, ascend)], "", ".3f")
    columns = ["decode 8K", "decode 32K", "train"]
    return Table("Figure 4", "USD a million tokens on 910B", columns, rows)


def _figure_5(sources: Sources) -> Table:
    rows = {}
    for label in ("DSv3", "Qwen3 MoE", "Step-3"):
        model = sources.models[label]
        ends = [token_cost(model, context) for context in CONTEXTS]
        values = [value for cost in ends for value in (cost.cache_bytes, cost.attention_flops)]
        intensity = arithmetic_intensity(model, CONTEXTS[0])
        rows[label] = [
            *_cells(values, "", ".2e"),
            Cell(intensity, f"{intensity:.0f}", paper.FIGURE_5[label]),
        ]
    for label, hardware in sources.hardware.items():
        none = [Cell(0.0, "")] * 4
        rows[label] = [*none, Cell(hardware.roofline, f"{hardware.roofline:.0f}")]
    return Table(
        "Figure 5",
        "attention's FLOPs against its bytes, and the hardware's rooflines",
        ["bytes 8K", "FLOPs 8K", "bytes 32K", "FLOPs 32K", "FLOPs a byte"],
        rows,
    )
