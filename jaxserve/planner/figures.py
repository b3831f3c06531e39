"""Draws Step-3's figures 1 to 5 from the data of `tables.py`. Called by `plan.py tables --svg`."""

from collections.abc import Mapping

from jaxserve.planner.svg import Series, bars, chart
from jaxserve.planner.tables import CURVE, K, Table

MILLION = "USD a million tokens"


def draw(figures: Mapping[str, Table]) -> dict[str, str]:
    """SVG by file name.

    Args:
      figures: the tables that `tables.figures` makes, by their names.
    """
    return {
        "figure-1.svg": _figure_1(figures["Figure 1"]),
        "figure-2-8k.svg": _figure_2(figures["Figure 2"], "8K"),
        "figure-2-32k.svg": _figure_2(figures["Figure 2"], "32K"),
        "figure-3a.svg": _curves(figures["Figure 3a"], "bytes"),
        "figure-3b.svg": _curves(figures["Figure 3b"], MILLION),
        "figure-4.svg": _figure_4(figures["Figure 4"]),
        "figure-5.svg": _figure_5(figures["Figure 5"]),
    }


def _figure_1(table: Table) -> str:
    points = {label: (row[0].value, row[1].value) for label, row in table.rows.items()}
    series = [Series("models", list(points.values()), line=False, names=list(points))]
    for title, column in (("front", 2), ("front of GQA models", 3)):
        front = sorted(points[label] for label, row in table.rows.items() if row[column].value)
        series.append(Series(title, front, dashed=True))
    return chart(
        "Figure 1: activated parameters and the cheapest deployment at 8K",
        "parameters that a token meets, 10⁹",
        MILLION,
        series,
    )


def _figure_2(table: Table, context: str) -> str:
    names = [column.split()[1] for column in table.columns if column.startswith(f"{context} ")]
    first = table.columns.index(f"{context} {names[0]}")
    series = [
        (name, [row[first + index].value for row in table.rows.values()])
        for index, name in enumerate(names)
    ]
    return bars(f"Figure 2: decoding at {context}", MILLION, list(table.rows), series)


def _curves(table: Table, y: str) -> str:
    series = [
        Series(label, [(c / K, cell.value) for c, cell in zip(CURVE, row, strict=True)])
        for label, row in table.rows.items()
    ]
    return chart(f"{table.name}: {table.title}", "context, 1024 tokens", y, series)


def _figure_4(table: Table) -> str:
    series = [(label, [cell.value for cell in row]) for label, row in table.rows.items()]
    return bars(f"{table.name}: {table.title}", MILLION, table.columns, series)


def _figure_5(table: Table) -> str:
    series = []
    widest = max(row[2].value for row in table.rows.values())
    highest = max(row[3].value for row in table.rows.values())
    for label, row in table.rows.items():
        if row[2].value:
            ends = [(row[0].value, row[1].value), (row[2].value, row[3].value)]
            series.append(Series(label, ends))
        else:
            roofline = row[4].value
            end = min(widest, highest / roofline)
            series.append(Series(label, [(0.0, 0.0), (end, end * roofline)], dashed=True))
    return chart(
        "Figure 5: attention from 8K to 32K, and the hardware's rooflines",
        "bytes of the cache a token",
        "FLOPs a token",
        series,
    )
