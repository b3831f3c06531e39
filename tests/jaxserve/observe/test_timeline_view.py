"""The files a timeline is written to: what stands in them, read back by other parsers."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from jaxserve.observe.spans import AFDStage, Span
from jaxserve.observe.timeline import summarise
from jaxserve.observe.timeline_view import describe, perfetto, svg, write
from tests import golden

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
    golden.check("observe/summary.txt", describe(summarise(SPANS)) + "\n")


def test_the_picture_is_to_scale_and_coloured_by_lane() -> None:
    """10 ms span 998 pixels from x = 196; neighbours keep a gap of 0.8."""
    found = bars(svg(SPANS, summarise(SPANS)))
    assert len(found) == len(SPANS)
    colours = {0: "#2f6db3", 1: "#d97706"}
    for span in SPANS:
        milliseconds = (span.end_ns - span.start_ns) / MS
        title = f"{span.stage}, layer {span.layer}, lane {span.lane}, step {span.step}: "
        left, width, colour = found[f"{title}{milliseconds:.2f} ms"]
        assert left == pytest.approx(196 + 99.8 * (span.start_ns - ORIGIN) / MS, abs=0.05)
        assert width == pytest.approx(99.8 * milliseconds - 0.8, abs=0.05)
        assert colour == colours[span.lane]


def test_the_picture_says_fractions_lanes_and_times() -> None:
    picture = ElementTree.fromstring(svg(SPANS, summarise(SPANS)))
    words = [text.text for text in picture.iter(f"{NAMESPACE}text")]
    assert words[0] == "2 steps on 2 lanes in 10.0 ms, as measured"
    assert words[1] == "attention 90.0% busy · ffn 30.0% busy · bubble 10.0%"
    assert words[2:4] == ["lane 0", "lane 1"]
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
    golden.check("observe/perfetto.json", perfetto(SPANS))


def test_the_three_files_are_written(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    summary = write(folder, SPANS)
    assert len(list(folder.iterdir())) == 3
    raw = json.loads((folder / "timeline.json").read_text())
    assert raw["steady"]["attention_busy"] == summary.attention_busy == 0.9
    assert len(raw["spans"]) == 6
    assert json.loads((folder / "timeline.perfetto.json").read_text())["displayTimeUnit"] == "ms"
    ElementTree.parse(folder / "timeline.svg")
