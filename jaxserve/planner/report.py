"""One self-contained HTML page of tables and pictures. Called by `plan.py --html`; it knows nothing
of what they say."""

from collections.abc import Sequence
from html import escape

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


def table(rows: Sequence[Sequence[str]], quiet: Sequence[int] = ()) -> str:
    """Rows under the first one, which is the heading; those of `quiet` are in grey. Cells that end
    in an exclamation mark are in red."""
    heading, *others = rows
    parts = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in heading) + "</tr>"]
    for index, row in enumerate(others, 1):
        cells = "".join(
            f'<td class="wrong">{escape(cell)}</td>'
            if cell.endswith("!")
            else f"<td>{escape(cell)}</td>"
            for cell in row
        )
        parts.append(f'<tr class="muted">{cells}</tr>' if index in quiet else f"<tr>{cells}</tr>")
    return f'<div class="wide"><table>{"".join(parts)}</table></div>'


def lines(texts: Sequence[str]) -> str:
    """A list."""
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>"


def page(title: str, sections: Sequence[tuple[str, str]]) -> str:
    """The page: (heading, HTML or SVG) after each other."""
    body = "".join(f"<h2>{escape(heading)}</h2>\n{content}\n" for heading, content in sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n{body}</body></html>\n"
    )
