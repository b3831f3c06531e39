"""Reports of `plan`: text for a terminal, JSON for programs, or one HTML page, with charts as SVG.

Called by every command, and by `bench/serving.py`. It knows nothing of what is in tables, lines and
charts.
"""

import argparse
import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import msgspec

Rows = Sequence[Sequence[str]]
"""A table: its heading, then rows of as many cells."""
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; margin: 2rem auto; max-width: 92rem;
  padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px }
th, td { padding: .2rem .5rem; text-align: right; border-bottom: 1px solid #e3e8ed }
td { white-space: nowrap } th { vertical-align: bottom }
th:first-child, td:first-child { text-align: left; white-space: normal }
.muted td { color: #616e7c; border-bottom: none } .wrong { color: #b42318; font-weight: 600 }
svg { max-width: 100%; height: auto }
"""


class Part(NamedTuple):
    """A part of a report.

    Attributes:
      heading: above it, also on a terminal.
      pictures: HTML or SVG, which a terminal does not show.
      aside: whether only the page has it.
    """

    heading: str = ""
    rows: Rows = ()
    lines: Sequence[str] = ()
    pictures: Sequence[str] = ()
    aside: bool = False

    @property
    def text(self) -> str:
        blocks = [self.heading, grid(self.rows) if self.rows else "", "\n".join(self.lines)]
        return "\n\n".join(filter(None, blocks))

    @property
    def html(self) -> str:
        """The part for a page. Rows whose first cell is indented are grey."""
        heading = [f"<h2>{escape(self.heading)}</h2>"] if self.heading else []
        tables = [_table(self.rows)] if self.rows else []
        items = "".join(f"<li>{escape(line)}</li>" for line in self.lines)
        listed = [f"<ul>{items}</ul>"] if items else []
        return "\n".join([*heading, *self.pictures, *tables, *listed])


class Report(NamedTuple):
    """Everything that a command shows.

    Attributes:
      title: of the page.
      tree: for `--json`.
    """

    title: str
    parts: Sequence[Part]
    tree: object

    @property
    def text(self) -> str:
        return "\n\n".join(filter(None, (part.text for part in self.parts if not part.aside)))

    @property
    def page(self) -> str:
        """The report as a page that needs nothing else."""
        title, body = escape(self.title), "\n".join(part.html for part in self.parts)
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            f"<title>{title}</title><style>{_STYLE}</style></head>\n"
            f"<body><h1>{title}</h1>\n{body}\n</body></html>\n"
        )


def show(options: argparse.Namespace, report: Report) -> None:
    """Prints a report as `--json` asks, and writes its page where `--html` asks."""
    if options.html:
        options.html.write_text(report.page, encoding="utf-8")
    print(json_text(report.tree) if options.json else report.text)


def json_text(tree: object) -> str:
    """Formats values for programs."""
    return msgspec.json.format(msgspec.json.encode(tree)).decode()


def grid(rows: Rows) -> str:
    """Formats columns side by side: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        parts = [first.ljust(widths[0])]
        parts += [text.rjust(width) for text, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def times_row(name: str, found: msgspec.Struct | None, digits: int = 2) -> list[str]:
    """A row of a mean and percentiles in milliseconds (`simulate.Times`); "-" for each without
    them."""
    if found is None:
        return [name, *["-"] * 5]
    return [name, *(f"{value * 1e3:.{digits}f}" for value in msgspec.structs.astuple(found))]


def _table(rows: Rows) -> str:
    """Formats a table. Cells that end in an exclamation mark are red."""
    heading, *others = rows
    parts = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in heading) + "</tr>"]
    for row in others:
        cells = "".join(
            f"<td{' class="wrong"' * cell.endswith('!')}>{escape(cell)}</td>" for cell in row
        )
        muted = ' class="muted"' if row[0].startswith("  ") else ""
        parts.append(f"<tr{muted}>{cells}</tr>")
    return f'<div class="wide"><table>{"".join(parts)}</table></div>'


# ------------------------------------------------------------------------------------- charts

COLOURS = ("#2f6db3", "#d97706", "#2f8f5b", "#8a4fa3", "#c2410c", "#0f766e", "#be185d", "#4b5563")
_TEXT, _MUTED, _GRID = "#1f2933", "#616e7c", "#e3e8ed"
_WIDTH, _HEIGHT = 720, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 20, 58, 54


class Series(NamedTuple):
    """A series of points that share a colour."""

    label: str
    points: Sequence[tuple[float, float]]
    line: bool = True
    """True: the points are joined by a line; False: marks, with the label next to the first."""
    dashed: bool = False
    names: Sequence[str] = ()
    """Texts next to the points."""
    chosen: bool = False
    """Whether the points are marked with a ring."""


def chart(title: str, x: str, y: str, series: Sequence[Series], logarithmic: bool = False) -> str:
    """A chart of lines and points; axes start at 0, or at the least point if logarithmic."""
    xs = [point[0] for one in series for point in one.points]
    ys = [point[1] for one in series for point in one.points]
    across = _Axis(xs, _LEFT, _WIDTH - _RIGHT, logarithmic)
    up = _Axis(ys, _HEIGHT - _BOTTOM, _TOP, logarithmic)
    parts = _frame(title, x, y, across, up)
    for index, one in enumerate(series):
        colour = COLOURS[index % len(COLOURS)]
        places = [(across.place(a), up.place(b)) for a, b in one.points]
        if one.line:
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
            dash = ' stroke-dasharray="6 4"' if one.dashed else ""
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
            )
        mark = f'r="4" fill="{colour}"'
        if one.chosen:
            mark = f'r="9" fill="none" stroke="{colour}" stroke-width="3"'
        if one.chosen or not one.dashed:
            parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" {mark}/>' for a, b in places]
        for (a, b), name in zip(places, one.names, strict=False):
            right = a > 0.85 * _WIDTH
            parts.append(
                _text(a - 7 if right else a + 7, b - 6, name, 11, "end" if right else "start")
            )
    left = float(_LEFT)
    for index, label in enumerate(one.label for one in series if one.label):
        colour = COLOURS[index % len(COLOURS)]
        parts.append(f'<rect x="{left:.0f}" y="34" width="11" height="11" fill="{colour}"/>')
        parts.append(_text(left + 16, 44, label, 12))
        left += 30 + 7 * len(label)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" font-family="system-ui, sans-serif">'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>' + "".join(parts) + "</svg>\n"
    )


class _Axis:
    """Maps values to pixels along one axis."""

    def __init__(
        self, values: Sequence[float], start: float, end: float, logarithmic: bool = False
    ):
        self._start, self._end, self._logarithmic = start, end, logarithmic
        if logarithmic:
            low, high = math.log10(min(values)), math.log10(max(values))
            self._low, self._high = math.floor(low), max(math.ceil(high), math.floor(low) + 1)
            self.ticks = [10.0**power for power in range(self._low, self._high + 1)]
            return
        top = max([*values, 1e-30])
        step = 10 ** math.floor(math.log10(top))
        step = next(s for s in (step / 5, step / 2, step, 2 * step, 5 * step) if top / s <= 6)
        count = math.ceil(top / step - 1e-9)
        self._low, self._high = 0, 1
        self._top = count * step
        self.ticks = [index * step for index in range(count + 1)]

    def place(self, value: float) -> float:
        if self._logarithmic:
            share = (math.log10(value) - self._low) / (self._high - self._low)
        else:
            share = value / self._top
        return self._start + share * (self._end - self._start)


def _frame(title: str, x: str, y: str, across: _Axis, up: _Axis) -> list[str]:
    parts = [_text(_LEFT, 22, title, 15)]
    for tick in up.ticks:
        place = up.place(tick)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{place:.1f}" y2="{place:.1f}" '
            f'stroke="{_GRID}"/>'
        )
        parts.append(_text(_LEFT - 8, place + 4, _number(tick), 11, "end", _MUTED))
    for tick in across.ticks:
        place = across.place(tick)
        parts.append(_text(place, _HEIGHT - _BOTTOM + 18, _number(tick), 11, "middle", _MUTED))
    parts.append(_text((_LEFT + _WIDTH) / 2, _HEIGHT - 12, x, 12, "middle", _MUTED))
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    parts.append(
        f'<text x="16" y="{middle:.0f}" font-size="12" fill="{_MUTED}" text-anchor="middle" '
        f'transform="rotate(-90 16 {middle:.0f})">{escape(y)}</text>'
    )
    return parts


def _text(
    x: float, y: float, text: str, size: int, anchor: str = "start", colour: str = _TEXT
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


def _number(value: float) -> str:
    large = f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
    return large if abs(value) >= 1e4 else f"{value:.3g}"
