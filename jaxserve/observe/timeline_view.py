"""Writes measured spans: a page that draws some steady steps, a Perfetto trace, and words.

The page and the live one of a server (`server/http/live.py`) share the style (`page.css`) and the
drawing of timelines (`page_timeline.js`) beside this file.

Called by the entry points with the merged spans of all processes (`--timeline DIR`), and by
`plan simulate` with simulated ones. It knows only spans.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from jaxserve.observe.spans import AFDStage, AnyStage, PassFill, Span
from jaxserve.observe.timeline import Summary, steady_window, summarise, typical_steps

SHARED = Path(__file__).parent
_ROWS: tuple[tuple[AFDStage, str], ...] = (
    ("attend", "attention"),
    ("dispatch", "dispatch ↓"),
    ("combine", "combine ↑"),
    ("ffn", "ffn"),
)
"""Rows of a trace, from the top: a token goes down and up again."""


class Bar(msgspec.Struct, frozen=True, array_like=True):
    """A stage that ran: its kind, lane, layer and step, its start and end in µs after the window's
    start, and what a pass had."""

    stage: AnyStage
    lane: int
    layer: int
    step: int
    start: int
    end: int
    fill: PassFill | None = None


def bars(spans: Iterable[Span], start_ns: int) -> list[Bar]:
    """Returns spans as a page draws them, in a window that begins at `start_ns`."""
    found = []
    for span in spans:
        start, end = ((at - start_ns) // 1000 for at in (span.start_ns, span.end_ns))
        found.append(Bar(span.stage, span.lane, span.layer, span.step, start, end, span.fill))
    return found


def write(directory: str | Path, spans: Sequence[Span], how: str = "as measured") -> Summary:
    """Writes timeline.html, timeline.perfetto.json and timeline.json; returns the steady summary.

    Args:
      directory: created if it is missing; files of these names are replaced.
      spans: merged spans of all processes.
      how: how they came about ("as measured", "as simulated"), for the page's title.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    steady = steady_summary(spans)
    raw = {"steady": steady, "whole": summarise(spans), "spans": spans}
    (directory / "timeline.json").write_bytes(msgspec.json.encode(raw))
    (directory / "timeline.perfetto.json").write_bytes(msgspec.json.encode(perfetto(spans)))
    (directory / "timeline.html").write_bytes(page(spans, steady, how))
    return steady


def steady_summary(spans: Sequence[Span]) -> Summary:
    """Returns the summary of some typical steps."""
    return summarise(spans, steady_window(spans, typical_steps(spans)))


def page(spans: Sequence[Span], summary: Summary, how: str = "as measured") -> bytes:
    """Returns a page that draws the summary's window and needs nothing else."""
    begin, end = summary.start_ns, summary.end_ns
    title, *_ = describe(summary).partition(":")
    measured = {
        "how": f"{title}, {how}",
        "figures": describe(summary),
        "at": end / 1e9,
        "window_seconds": summary.milliseconds / 1e3,
        "timeline": bars((s for s in spans if s.end_ns > begin and s.start_ns < end), begin),
    }
    scripts = [SHARED / f"page_{part}.js" for part in ("common", "timeline")]
    html = assembled(SHARED / "timeline.html", scripts)
    data = msgspec.json.encode(measured).replace(b"<", b"\\u003c")
    return html.replace(b">null</script>", b">%b</script>" % data)


def assembled(html: Path, scripts: Sequence[Path]) -> bytes:
    """Returns a page with its style, and the parts of its script in order, in place of its first
    empty `<style>` and `<script>`."""
    page = html.read_bytes()
    style = (SHARED / "page.css").read_bytes()
    script = b"\n".join(part.read_bytes() for part in scripts)
    for tag, text in ((b"style", style), (b"script", script)):
        page = page.replace(b"<%b></%b>" % (tag, tag), b"<%b>\n%b</%b>" % (tag, text, tag), 1)
    return page


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
                    **(span.fill._asdict() if span.fill else {}),
                },
            }
        )
    return {"displayTimeUnit": "ms", "otherData": {"origin_ns": origin}, "traceEvents": events}


def _metadata(kind: str, pid: int, tid: int, **args: object) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _duration(milliseconds: float) -> str:
    """Three digits in the unit that suits: 2.31 µs, 1.07 ms, 93.4 ms."""
    value, unit = (milliseconds, "ms") if milliseconds >= 0.1 else (milliseconds * 1e3, "µs")
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
