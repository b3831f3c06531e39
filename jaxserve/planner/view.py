"""Reports of `plan`: text for a terminal, JSON for programs, or one HTML page.

Called by every command, with tables, lines and pictures of which this module knows nothing.
"""

import argparse
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
        marks = (' class="wrong"' if cell.endswith("!") else "" for cell in row)
        cells = "".join(
            f"<td{mark}>{escape(cell)}</td>" for mark, cell in zip(marks, row, strict=True)
        )
        muted = ' class="muted"' if row[0].startswith("  ") else ""
        parts.append(f"<tr{muted}>{cells}</tr>")
    return f'<div class="wide"><table>{"".join(parts)}</table></div>'
