"""Reports: text for a terminal, JSON for programs, and a page with charts (`report.html`).

Every `plan` command shows a report, whose tables, lines and JSON `reports.yaml` declares, and
`bench/serving.py` writes one. Nothing here knows what they are about.
"""

import argparse
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import msgspec
import yaml

Rows = Sequence[Sequence[str]]
"""A table: its heading, then rows with a cell for each column."""
_ENVIRONMENT = jinja2.Environment(
    autoescape=True, loader=jinja2.FileSystemLoader(Path(__file__).parent)
)

_TEXTS = jinja2.Environment(undefined=jinja2.ChainableUndefined, trim_blocks=True)
_REPORTS: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_name("reports.yaml").read_text(encoding="utf-8")
)
_TREES: dict[str, str] = _REPORTS.pop("trees")
_VALUES: dict[str, dict[str, str]] = _REPORTS.pop("values")


def _drawn(macro: str, *arguments: Any) -> str:
    """Returns what a macro of the template makes of its arguments."""
    made: Any = _ENVIRONMENT.get_template("report.html").module
    return str(getattr(made, macro)(*arguments))


class PagePart(NamedTuple):
    """A part of a report. On the page, rows whose first cell is indented are grey, and cells that
    end in an exclamation mark are red; the page alone has pictures (HTML or SVG), and parts that
    are `aside`."""

    heading: str = ""
    rows: Rows = ()
    lines: Sequence[str] = ()
    pictures: Sequence[str] = ()
    aside: bool = False

    @property
    def text(self) -> str:
        blocks = [self.heading, grid(self.rows) if self.rows else "", "\n".join(self.lines)]
        return "\n\n".join(filter(None, blocks))


class Report(NamedTuple):
    """Everything that a command shows: parts, the page's title, and what `--json` prints."""

    title: str
    parts: Sequence[PagePart]
    tree: object

    @property
    def text(self) -> str:
        return "\n\n".join(filter(None, (part.text for part in self.parts if not part.aside)))

    @property
    def page(self) -> str:
        """The report as a page that needs no other file."""
        return _drawn("page", self.title, [part[:-1] for part in self.parts])


def show(options: argparse.Namespace, report: Report) -> None:
    """Prints a report as `--json` asks, and writes its page where `--html` asks."""
    if options.html:
        options.html.write_text(report.page, encoding="utf-8")
    print(json_text(report.tree) if options.json else report.text)


def reported(name: str, title: str, /, **values: Any) -> Report:
    """Returns the report that `reports.yaml` declares by this name, filled in with its values."""
    values["title"] = title
    for key, expression in _VALUES.get(name, {}).items():
        values[key] = _value(expression, values)
    return Report(title, declared(name, **values), _value(_TREES[name], values))


def json_text(tree: object) -> str:
    """Formats values for programs."""
    return msgspec.json.format(msgspec.json.encode(_plain(tree))).decode()


def _plain(value: Any) -> Any:
    """Makes objects of named tuples and structs, and of what these hold."""
    if isinstance(value, msgspec.Struct):
        return msgspec.to_builtins(value)
    if hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [*map(_plain, value)] if isinstance(value, list | tuple) else value


def grid(rows: Rows) -> str:
    """Formats columns side by side: the first to the left, the others to the right."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = []
    for name, *cells in rows:
        aligned = (cell.rjust(width) for cell, width in zip(cells, others, strict=True))
        lines.append("  ".join([name.ljust(first), *aligned]).rstrip())
    return "\n".join(lines)


def declared(report: str, /, **values: Any) -> list[PagePart]:
    """Returns the parts that `reports.yaml` declares for a report, filled in with its values."""
    return [part for told in _REPORTS[report] for part in _parts(told, values)]


def _parts(told: dict[str, Any], values: dict[str, Any]) -> Iterator[PagePart]:
    def filled(text: str, **more: Any) -> str:
        return _TEXTS.from_string(text).render(values | {"part": part} | more)

    for part in _value(told["of"], values) if "of" in told else (None,):
        columns = told.get("columns", {})
        items = _value(told.get("each", "()"), values | {"part": part})
        rows = [[filled(cell, one=item) for cell in columns.values()] for item in items]
        lines = "\n".join(filled(text) for text in told.get("lines", ())).splitlines()
        yield PagePart(
            filled(told.get("heading", "")),
            [[*map(filled, columns)], *rows] if rows else (),
            [line for line in lines if line.strip()],
            [values[picture] for picture in told.get("pictures", ())],
            told.get("aside", False),
        )


def _value(expression: str, values: Mapping[str, Any]) -> Any:
    return _TEXTS.compile_expression(expression)(**values)


def _trees(items: Any, name: str) -> Any:
    """Returns what `reports.yaml` declares under `trees` for each of some items, for JSON."""
    if isinstance(items, Mapping):
        return {key: _value(_TREES[name], {"one": item}) for key, item in items.items()}
    return [_value(_TREES[name], {"one": item}) for item in items]


_TEXTS.filters |= {"f": format, "plain": _plain, "trees": _trees}


def times_row(name: str, found: msgspec.Struct | None, digits: int = 2) -> list[str]:
    """Returns a row of a mean and percentiles in milliseconds (`results.Times`), each "-" if they
    are unknown."""
    if found is None:
        return [name, *["-"] * 5]
    return [name, *(f"{value * 1e3:.{digits}f}" for value in msgspec.structs.astuple(found))]


COLOURS = ("#2f6db3", "#d97706", "#2f8f5b", "#8a4fa3", "#c2410c", "#0f766e", "#be185d", "#4b5563")
LEFT, RIGHT, TOP, BOTTOM = 76, 700, 58, 386
"""Edges of the axes in a chart of 720 by 440 pixels, which the template draws."""


class Series(NamedTuple):
    """A series of points that share a colour: joined by a line, or marks; with names next to the
    first points, and with a ring where they are chosen."""

    label: str
    points: Sequence[tuple[float, float]]
    line: bool = True
    dashed: bool = False
    names: Sequence[str] = ()
    chosen: bool = False


def chart(title: str, x: str, y: str, series: Sequence[Series], logarithmic: bool = False) -> str:
    """Returns a chart of lines and points as SVG. Axes start at 0; logarithmic ones at the power of
    ten below the least point."""
    xs, ys = zip(*(point for one in series for point in one.points), strict=True)
    across, up = _Axis(x, xs, LEFT, RIGHT, logarithmic), _Axis(y, ys, BOTTOM, TOP, logarithmic)
    places = ([(across.place(a), up.place(b)) for a, b in one.points] for one in series)
    return _drawn("chart", title, across, up, [*zip(series, itertools.cycle(COLOURS), places)])


class _Axis:
    """Maps values to pixels along one axis; `ticks` are (text, pixel)."""

    def __init__(
        self, label: str, values: Sequence[float], start: float, end: float, logarithmic: bool
    ):
        self.label, self._start, self._length = label, start, end - start
        self._scale = math.log10 if logarithmic else float
        if logarithmic:
            low, high = (math.log10(end(values)) for end in (min, max))
            first = math.floor(low)
            ticks = [10.0**power for power in range(first, max(math.ceil(high), first + 1) + 1)]
        else:
            top = max([*values, 1e-30])
            step = 10 ** math.floor(math.log10(top))
            step = next(s for s in (step / 5, step / 2, step, 2 * step, 5 * step) if top / s <= 6)
            ticks = [index * step for index in range(math.ceil(top / step - 1e-9) + 1)]
        self._low, self._high = self._scale(ticks[0]), self._scale(ticks[-1])
        self.ticks = [(_number(tick), self.place(tick)) for tick in ticks]

    def place(self, value: float) -> float:
        share = (self._scale(value) - self._low) / (self._high - self._low)
        return self._start + share * self._length


def _number(value: float) -> str:
    large = f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
    return large if abs(value) >= 1e4 else f"{value:.3g}"
