"""The page of a search in a headless Chromium, as wide as a laptop's window."""

from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve.plan import main
from tests.browser import launched, needs_browser

pytestmark = needs_browser

WIDTH = 1300
ASKED = ["search", "--model", "qwen3-235b-a22b", "--hardware", "h800", "v6e", "--context", "4K"]
ASKED += ["--tpot", "100ms", "--max-devices", "16", "--weights", "int8", "--cache", "int8"]

CELLS = """
tables => tables.map(table => ({
  cut: table.parentElement.scrollWidth - table.parentElement.clientWidth,
  rows: [...table.rows].map(row => [...row.cells].map(cell => {
    const box = cell.getBoundingClientRect(), text = document.createRange();
    text.selectNodeContents(cell);
    const inner = text.getBoundingClientRect();
    const outside = cell.textContent && Math.max(box.left - inner.left, inner.right - box.right,
      box.top - inner.top, inner.bottom - box.bottom);
    return {text: cell.textContent, left: box.left, right: box.right, outside: outside || 0};
  }))
}))
"""
PICTURE = """
svg => {
  const [dots, marks] = ["4", "9"].map(r => [...svg.querySelectorAll(`circle[r="${r}"]`)].map(
    circle => [circle.cx.baseVal.value, circle.cy.baseVal.value]));
  const frame = svg.getBoundingClientRect();
  const words = [...svg.querySelectorAll("text")].map(text => {
    const box = text.getBoundingClientRect();
    return {text: text.textContent, inside: Math.min(box.left - frame.left, frame.right - box.right,
      box.top - frame.top, frame.bottom - box.bottom)};
  });
  return {dots, marks, words};
}
"""


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
