"""The page of a search in a headless Chromium, as wide as a laptop's window."""

from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve.plan import main
from tests import golden
from tests.browser import launched, needs_browser

pytestmark = needs_browser

WIDTH = 1300
ASKED = ["search", "--model", "qwen3-235b-a22b", "--hardware", "h800", "v6e", "--context", "4K"]
ASKED += ["--tpot", "100ms", "--max-devices", "16", "--weights", "int8", "--cache", "int8"]

CELLS = golden.text("planner/cells_of_tables.js")
PICTURE = golden.text("planner/marks_of_picture.js")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    file = tmp_path_factory.mktemp("report") / "plans.html"
    assert main([*ASKED, "--html", str(file)]) == 0
    for browser in launched():
        page = browser.new_page(viewport={"width": WIDTH, "height": 900})
        page.goto(file.as_uri())
        yield page


def test_no_column_is_cut_or_overlaps_another(page):
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDTH
    tables = page.locator("table").evaluate_all(CELLS)
    assert len(tables) == 3  # AFD, colocated EP, colocated TP
    for table in tables:
        assert table["cut"] <= 0
        assert len(table["rows"]) > 1
        for row in table["rows"]:
            assert len(row) == 14
            ends = [*(cell["left"] for cell in row[1:]), WIDTH]
            for cell, end in zip(row, ends, strict=True):
                assert cell["outside"] <= 0.5, cell
                assert cell["right"] <= end + 0.5, cell


def test_the_chosen_plan_is_marked_on_the_front(page):
    """A ring around one of the plans, the cheapest, with its name, in a picture that is whole."""
    picture = page.locator("svg").last.evaluate(PICTURE)
    (ring,) = picture["marks"]
    assert min(picture["dots"], key=lambda dot: -dot[1]) == pytest.approx(ring)
    # The name stands beside the ring and in the legend.
    assert [word["text"] for word in picture["words"]].count("chosen") == 2
    assert all(word["inside"] >= 0 for word in picture["words"])
