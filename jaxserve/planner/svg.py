"""Charts as SVG, of lines and points on linear or logarithmic axes.

Called by `search_view.py` and `bench/serving.py`.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

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
