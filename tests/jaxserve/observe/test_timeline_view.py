"""The files a timeline is written to: what stands in them, read back by other parsers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from jaxserve.observe.spans import AFDStage, PassFill, Span
from jaxserve.observe.timeline import summarise
from jaxserve.observe.timeline_view import describe, page, perfetto, write
from tests import golden
from tests.browser import launched, needs_browser

MS = 1_000_000
ORIGIN = 1_800_000_000_000_000_000


def ran(stage: AFDStage, start: int, end: int, lane: int, layer: int = 0) -> Span:
    at = ORIGIN + start * MS
    return Span(stage, lane, layer, lane, at, ORIGIN + end * MS, 0, at - 2 * MS)


SPANS = [
    ran("attend", 0, 4, 0),
    ran("attend", 4, 8, 1),
    ran("dispatch", 4, 5, 0),
    replace(ran("ffn", 5, 8, 0), fill=PassFill(3, 4, 1)),
    ran("combine", 8, 9, 0),
    ran("attend", 9, 10, 0, layer=1),
]


def test_the_words_of_a_summary() -> None:
    golden.check("observe/summary.txt", describe(summarise(SPANS)) + "\n")


def drawn(html: bytes) -> dict[str, Any]:
    """Drawing of the page's script."""
    found = re.search(rb'id="measured">(.*?)</script>', html)
    assert found
    return json.loads(found[1])


def test_the_page_has_the_stages_of_the_window() -> None:
    window = ORIGIN + 5 * MS, ORIGIN + 7 * MS
    found = drawn(page(SPANS, summarise(SPANS, window), "</script> & simulated"))
    alone, filled = ["attend", 1, 0, 1, -1000, 3000, None], ["ffn", 0, 0, 0, 0, 3000, [3, 4, 1]]
    assert found["timeline"] == [alone, filled]
    assert found["window_seconds"] == 0.002
    assert found["how"] == "2.00 ms, 0 steps on 0 lanes, </script> & simulated"
    assert found["figures"] == describe(summarise(SPANS, window))


@pytest.mark.nightly
@needs_browser
def test_a_browser_draws_the_page(tmp_path: Path) -> None:
    problems: list[str] = []

    def note(error: object) -> None:
        problems.append(str(error))

    for browser in launched():
        shown = browser.new_page()
        shown.on("pageerror", note)
        for spans in ([], SPANS):
            write(tmp_path, spans)
            shown.goto((tmp_path / "timeline.html").as_uri())
            assert shown.locator("#timeline title").count() == len(spans)
            assert "as measured" in shown.locator("#how").inner_text()
    assert problems == []


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
