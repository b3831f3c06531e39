"""Draws measured spans: a Perfetto trace, an SVG of a few steady steps, and words.

Called by the entry points with the merged spans of all processes (`--timeline DIR`), and by
`plan simulate` with simulated ones. It knows only spans.
"""

from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import msgspec

from jaxserve.observe.spans import AFDStage, AnyStage, Span
from jaxserve.observe.timeline import StageSummary, Summary, steady_window, summarise, typical_steps

# Attention on top, the ffn at the bottom, the link between them: a token goes down and up again.
_ROWS: tuple[tuple[AFDStage, str], ...] = (
    ("attend", "attention"),
    ("dispatch", "dispatch ↓"),
    ("combine", "combine ↑"),
    ("ffn", "ffn"),
)
_LANE_COLOURS = ("#2f6db3", "#d97706", "#2f8f5b", "#8a4fa3")
_TEXT, _MUTED, _TRACK, _GRID = "#1f2933", "#616e7c", "#eef1f4", "#d3dae2"

_WIDTH, _LEFT, _RIGHT = 1280, 196, 86
_TOP, _BAR, _LINK_BAR, _GAP = 84, 46, 26, 12
_LABELLED_WIDTH = 13.0
"""Width in pixels of a row's median bar from which bars are labelled with their layer."""


def write(directory: str | Path, spans: Sequence[Span], how: str = "as measured") -> Summary:
    """Writes timeline.perfetto.json, timeline.svg and timeline.json; returns the steady summary.

    Args:
      directory: created if it is missing; files of these names are replaced.
      spans: merged spans of all processes.
      how: how they came about ("as measured", "as simulated"), for the picture's title.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    steady = summarise(spans, steady_window(spans, typical_steps(spans)))
    raw = {"steady": steady, "whole": summarise(spans), "spans": spans}
    (directory / "timeline.json").write_bytes(msgspec.json.encode(raw))
    (directory / "timeline.perfetto.json").write_bytes(msgspec.json.encode(perfetto(spans)))
    (directory / "timeline.svg").write_text(svg(spans, steady, how), encoding="utf-8")
    return steady


def describe(summary: Summary) -> str:
    """A summary as text: one line for the window, one per stage."""
    lines = [
        f"{_duration(summary.milliseconds)}, {_count(summary.steps, 'step')} on "
        f"{_count(summary.lanes, 'lane')}: attention {summary.attention_busy:.1%} busy, "
        f"ffn {summary.ffn_busy:.1%} busy, bubble {summary.bubble:.1%}"
    ]
    for stage, times in summary.stages.items():
        lines.append(
            f"  {stage:<8} {times.count:>6} spans, median {_duration(times.median_ms)}, "
            f"p90 {_duration(times.p90_ms)}, busy {times.busy:.1%}"
        )
    return "\n".join(lines)


def perfetto(spans: Sequence[Span]) -> dict[str, object]:
    """The spans as Chrome trace events, for ui.perfetto.dev: one row per role and lane."""
    origin = min((span.start_ns for span in spans), default=0)
    rows: dict[AnyStage, int] = {stage: index + 1 for index, (stage, _) in enumerate(_ROWS)}
    events: list[dict[str, object]] = []
    for stage, label in _ROWS:
        pid = rows[stage]
        events.append(_metadata("process_name", pid, 0, name=label))
        events.append(_metadata("process_sort_index", pid, 0, sort_index=pid))
        for lane in sorted({span.lane for span in spans if span.stage == stage}):
            events.append(_metadata("thread_name", pid, lane, name=f"lane {lane}"))
            events.append(_metadata("thread_sort_index", pid, lane, sort_index=lane))
    for span in spans:
        events.append(
            {
                "ph": "X",
                "cat": span.stage,
                "name": f"{span.stage} {span.layer}",
                "ts": (span.start_ns - origin) / 1e3,
                "dur": (span.end_ns - span.start_ns) / 1e3,
                "pid": rows[span.stage],
                "tid": span.lane,
                "args": {
                    "layer": span.layer,
                    "lane": span.lane,
                    "step": span.step,
                    "process": span.process,
                    "waited_us": (span.start_ns - span.enqueued_ns) / 1e3,
                },
            }
        )
    return {"displayTimeUnit": "ms", "otherData": {"origin_ns": origin}, "traceEvents": events}


def _metadata(kind: str, pid: int, tid: int, **args: object) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def svg(spans: Sequence[Span], summary: Summary, how: str = "as measured") -> str:
    """An SVG of the summary's window: one row per role and link direction, coloured by lane."""
    begin, finish = summary.start_ns, max(summary.end_ns, summary.start_ns + 1)
    shown = [span for span in spans if span.end_ns > begin and span.start_ns < finish]
    lanes = sorted({span.lane for span in shown})
    scale = (_WIDTH - _LEFT - _RIGHT) / (finish - begin)
    heights = [_LINK_BAR if stage in ("dispatch", "combine") else _BAR for stage, _ in _ROWS]
    tops = [_TOP + sum(heights[:row]) + _GAP * row for row in range(len(_ROWS))]
    bottom = tops[-1] + heights[-1]

    parts = [_header(bottom + 64), *_legend(summary, lanes, how)]
    for (stage, label), top, height in zip(_ROWS, tops, heights, strict=True):
        parts += _track(label, summary.stages[stage], top, height)
    parts += _axis((finish - begin) / 1e6, bottom)
    for (stage, _), top, height in zip(_ROWS, tops, heights, strict=True):
        row = [span for span in shown if span.stage == stage]
        labelled = summary.stages[stage].median_ms * 1e6 * scale >= _LABELLED_WIDTH
        for span in row:
            left = _LEFT + max(0, span.start_ns - begin) * scale
            right = _LEFT + (min(span.end_ns, finish) - begin) * scale
            parts.append(_bar(span, left, right - left, top, height, labelled))
    parts.append("</svg>\n")
    return "\n".join(parts)


def _header(height: int) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" '
        f'font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif" font-size="13">\n'
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>'
    )


def _legend(summary: Summary, lanes: Sequence[int], how: str) -> list[str]:
    title = (
        f"{_count(summary.steps, 'step')} on {_count(summary.lanes, 'lane')} in "
        f"{_duration(summary.milliseconds)}, {how}"
    )
    fractions = (
        f"attention {summary.attention_busy:.1%} busy · ffn {summary.ffn_busy:.1%} busy · "
        f"bubble {summary.bubble:.1%}"
    )
    parts = [
        _words(24, 32, title, size=17, weight=600),
        _words(24, 56, fractions, size=14),
    ]
    left = _WIDTH - 24 - 84 * len(lanes)
    for lane in lanes:
        parts.append(
            f'<rect x="{left}" y="21" width="14" height="14" rx="3" fill="{_colour(lane)}"/>'
        )
        parts.append(_words(left + 20, 33, f"lane {lane}"))
        left += 84
    return parts


def _track(label: str, times: StageSummary, top: int, height: int) -> list[str]:
    """A row's background, its name and durations on the left, its busy share on the right."""
    durations = f"median {_duration(times.median_ms)}, p90 {_duration(times.p90_ms)}"
    middle = top + height / 2
    width = _WIDTH - _LEFT - _RIGHT
    return [
        f'<rect x="{_LEFT}" y="{top}" width="{width}" height="{height}" fill="{_TRACK}"/>',
        _words(24, middle - 2, label, weight=600),
        _words(24, middle + 13, durations, size=11, fill=_MUTED),
        _words(_WIDTH - _RIGHT + 12, middle + 5, f"{times.busy:.1%}", weight=600),
    ]


def _bar(span: Span, left: float, width: float, top: int, height: int, labelled: bool) -> str:
    told = (
        f"{span.stage}, layer {span.layer}, lane {span.lane}, step {span.step}: "
        f"{_duration(span.milliseconds)}"
    )
    gap = 0.8 if width > 4 else 0.0  # neighbours of one colour stay apart where there is room
    bar = (
        f'<rect x="{left:.2f}" y="{top}" width="{max(width - gap, 0.6):.2f}" height="{height}" '
        f'fill="{_colour(span.lane)}"><title>{escape(told)}</title></rect>'
    )
    label = str(span.layer)
    if not labelled or width < 7 * len(label) + 2:
        return bar
    middle = left + (width - gap) / 2
    return bar + _words(middle, top + height / 2 + 4, label, 11, fill="#ffffff", anchor="middle")


def _axis(milliseconds: float, bottom: int) -> list[str]:
    """Grid lines and labels at round times, in ms from the window's start."""
    width = _WIDTH - _LEFT - _RIGHT
    tick = _round_step(milliseconds / 8)
    digits = max(0, -_exponent(tick))
    parts = []
    for index in range(int(milliseconds / tick + 1e-9) + 1):
        x = _LEFT + width * index * tick / milliseconds
        parts.append(
            f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{_TOP - 6}" y2="{bottom + 6}" '
            f'stroke="{_GRID}" stroke-width="1"/>'
        )
        text = f"{index * tick:.{digits}f}"
        parts.append(_words(x, bottom + 22, text, size=12, fill=_MUTED, anchor="middle"))
    middle = _LEFT + width / 2
    note = "time in ms · number in a bar: its layer · on the right: the share of time a row is busy"
    parts.append(_words(middle, bottom + 44, note, size=12, fill=_MUTED, anchor="middle"))
    return parts


def _round_step(at_least: float) -> float:
    """The smallest of 1, 2, 5 × 10ⁿ that is not below `at_least`."""
    power = 10.0 ** _exponent(at_least)
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= at_least)


def _exponent(value: float) -> int:
    """The decimal exponent of a positive value."""
    return int(f"{value:e}".partition("e")[2])


def _words(
    x: float,
    y: float,
    text: str,
    size: int = 13,
    *,
    weight: int = 400,
    fill: str = _TEXT,
    anchor: str = "start",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" '
        f'fill="{fill}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def _duration(milliseconds: float) -> str:
    """Three digits in the unit that suits: 2.31 µs, 1.07 ms, 93.4 ms."""
    value, unit = (milliseconds, "ms") if milliseconds >= 0.1 else (milliseconds * 1e3, "µs")
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"


def _colour(lane: int) -> str:
    return _LANE_COLOURS[lane % len(_LANE_COLOURS)]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
