"""The files a timeline is written to: what stands in them, read back by other parsers."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from jaxserve.observe.spans import AFDStage, Span
from jaxserve.observe.timeline import summarise
from jaxserve.observe.timeline_view import describe, perfetto, svg, write

MS = 1_000_000
ORIGIN = 1_800_000_000_000_000_000
NAMESPACE = "{http://www.w3.org/2000/svg}"


def ran(stage: AFDStage, start: int, end: int, lane: int, layer: int = 0) -> Span:
    at = ORIGIN + start * MS
    return Span(stage, lane, layer, lane, at, ORIGIN + end * MS, 0, at - 2 * MS)


SPANS = [
    ran("attend", 0, 4, 0),
    ran("attend", 4, 8, 1),
    ran("dispatch", 4, 5, 0),
    ran("ffn", 5, 8, 0),
    ran("combine", 8, 9, 0),
    ran("attend", 9, 10, 0, layer=1),
]


def bars(picture: str) -> dict[str, tuple[float, float, str]]:
    """Title → (left, width, colour) of every rectangle that stands for a span."""
    found = {}
    for rectangle in ElementTree.fromstring(picture).iter(f"{NAMESPACE}rect"):
        title = rectangle.find(f"{NAMESPACE}title")
        if title is not None:
            place = float(rectangle.get("x", "")), float(rectangle.get("width", ""))
            found[title.text] = (*place, rectangle.get("fill", ""))
    return found


def test_the_words_of_a_summary() -> None:
    assert describe(summarise(SPANS)) == (
        "10.0 ms, 2 steps on 2 lanes: attention 90.0% busy, ffn 30.0% busy, bubble 10.0%\n"
        "  attend        3 spans, median 4.00 ms, p90 4.00 ms, busy 90.0%\n"
        "  dispatch      1 spans, median 1.00 ms, p90 1.00 ms, busy 10.0%\n"
        "  ffn           1 spans, median 3.00 ms, p90 3.00 ms, busy 30.0%\n"
        "  combine       1 spans, median 1.00 ms, p90 1.00 ms, busy 10.0%"
    )


def test_the_picture_is_to_scale_and_coloured_by_lane() -> None:
    found = bars(svg(SPANS, summarise(SPANS)))
    # The window of 10 ms spans 998 pixels from x = 196; neighbours keep a gap of 0.8.
    assert found == {
        "attend, layer 0, lane 0, step 0: 4.00 ms": (196.0, 398.4, "#2f6db3"),
        "attend, layer 0, lane 1, step 1: 4.00 ms": (595.2, 398.4, "#d97706"),
        "dispatch, layer 0, lane 0, step 0: 1.00 ms": (595.2, 99.0, "#2f6db3"),
        "ffn, layer 0, lane 0, step 0: 3.00 ms": (695.0, 298.6, "#2f6db3"),
        "combine, layer 0, lane 0, step 0: 1.00 ms": (994.4, 99.0, "#2f6db3"),
        "attend, layer 1, lane 0, step 0: 1.00 ms": (1094.2, 99.0, "#2f6db3"),
    }


def test_the_picture_says_fractions_lanes_and_times() -> None:
    words = [
        text.text
        for text in ElementTree.fromstring(svg(SPANS, summarise(SPANS))).iter(f"{NAMESPACE}text")
    ]
    assert words[:4] == [
        "2 steps on 2 lanes in 10.0 ms, as measured",
        "attention 90.0% busy · ffn 30.0% busy · bubble 10.0%",
        "lane 0",
        "lane 1",
    ]
    assert words[4:16:3] == ["attention", "dispatch ↓", "combine ↑", "ffn"]
    assert words[16:22] == ["0", "2", "4", "6", "8", "10"]


def test_spans_are_cut_at_the_window() -> None:
    window = ORIGIN + 5 * MS, ORIGIN + 7 * MS
    found = bars(svg(SPANS, summarise(SPANS, window)))
    assert list(found) == [
        "attend, layer 0, lane 1, step 1: 4.00 ms",
        "ffn, layer 0, lane 0, step 0: 3.00 ms",
    ]
    assert {place[:2] for place in found.values()} == {(196.0, 997.2)}


@pytest.mark.parametrize("spans", [[], SPANS[:1]])
def test_little_or_nothing_recorded_still_draws(spans: list[Span]) -> None:
    assert len(bars(svg(spans, summarise(spans)))) == len(spans)


def test_the_perfetto_trace_has_a_row_per_side_and_lane() -> None:
    trace = perfetto(SPANS)
    events = trace["traceEvents"]
    assert isinstance(events, list)
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    assert names == {
        (1, 0): "lane 0",
        (1, 1): "lane 1",
        (2, 0): "lane 0",
        (3, 0): "lane 0",
        (4, 0): "lane 0",
    }
    assert [event for event in events if event["ph"] == "X"][3] == {
        "ph": "X",
        "cat": "ffn",
        "name": "ffn 0",
        "ts": 5000.0,
        "dur": 3000.0,
        "pid": 4,
        "tid": 0,
        "args": {"layer": 0, "lane": 0, "step": 0, "process": 0, "waited_us": 2000.0},
    }


def test_the_three_files_are_written(tmp_path: Path) -> None:
    summary = write(tmp_path / "new" / "folder", SPANS)
    folder = tmp_path / "new" / "folder"
    assert sorted(path.name for path in folder.iterdir()) == [
        "timeline.json",
        "timeline.perfetto.json",
        "timeline.svg",
    ]
    raw = json.loads((folder / "timeline.json").read_text())
    assert raw["steady"]["attention_busy"] == summary.attention_busy == 0.9
    assert len(raw["spans"]) == 6
    assert json.loads((folder / "timeline.perfetto.json").read_text())["displayTimeUnit"] == "ms"
    ElementTree.parse(folder / "timeline.svg")
