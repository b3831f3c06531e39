"""Tables for a terminal and for `--json`. Called by `plan.py`; it knows nothing of their matter."""

from collections.abc import Sequence
from typing import Any

import msgspec

from jaxserve.planner.tables import Cell, Table


def json_text(tree: object) -> str:
    """What `--json` prints."""
    return msgspec.json.format(msgspec.json.encode(tree)).decode()


def grid(rows: Sequence[Sequence[str]]) -> str:
    """Columns side by side: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        parts = [first.ljust(widths[0])]
        parts += [text.rjust(width) for text, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def compared_rows(table: Table) -> list[list[str]]:
    """A heading and our rows, under every one with printed cells the paper's and the difference."""
    rows = [["", *table.columns]]
    for label, cells in table.rows.items():
        rows.append([label, *(cell.text for cell in cells)])
        if any(cell.printed for cell in cells):
            rows.append(["  paper", *(cell.printed for cell in cells)])
            rows.append(["  difference", *map(_difference, cells)])
    return rows


def compared_text(table: Table) -> str:
    """`compared_rows` for a terminal."""
    return f"{table.name}: {table.title}\n\n{grid(compared_rows(table))}"


def _difference(cell: Cell) -> str:
    if not cell.printed:
        return ""
    relative = "" if cell.difference is None else f"{100 * cell.difference:+.2f}%"
    return relative if cell.agrees else f"{relative} !"


def agreement(tables: Sequence[Table]) -> str:
    """How many cells agree with the paper, and which do not."""
    compared = [cell for table in tables for cell in table.compared]
    lines = [
        f"{sum(cell.agrees for cell in compared)} of {len(compared)} printed cells agree to the "
        "printed digits"
    ]
    for table in tables:
        for label, cells in table.rows.items():
            lines += [
                f"  {table.name}, {label}, {column}: {cell.text}, the paper prints {cell.printed}"
                for column, cell in zip(table.columns, cells, strict=True)
                if not cell.agrees
            ]
    return "\n".join(lines)


def as_tree(table: Table) -> dict[str, Any]:
    """For `--json`."""
    return {
        "name": table.name,
        "title": table.title,
        "rows": {
            label: {
                column: {
                    "value": cell.value,
                    "printed": cell.printed or None,
                    "difference": cell.difference if cell.printed else None,
                    "agrees": cell.agrees,
                }
                for column, cell in zip(table.columns, cells, strict=True)
            }
            for label, cells in table.rows.items()
        },
    }
