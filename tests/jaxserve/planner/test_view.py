"""Pages are whole; charts are well-formed and put things where they belong."""

import xml.etree.ElementTree as ElementTree

import pytest

from jaxserve.planner.view import PagePart, Report, Series, chart


def test_a_page_is_well_formed_and_needs_nothing_else():
    parts = [PagePart("one", [["", "x"], ["row", "1"]]), PagePart("two", lines=["<i>"])]
    text = Report("a < b", parts, None).page
    assert text.startswith("<!doctype html>\n")
    body = text.partition("</head>")[2].removesuffix("</html>\n").strip()
    root = ElementTree.fromstring(body)
    assert [heading.text for heading in root.iter("h2")] == ["one", "two"]
    assert [cell.text for cell in root.iter("td")] == ["row", "1"]
    assert [item.text for item in root.iter("li")] == ["<i>"]
    assert "http" not in text


def test_cells_that_do_not_agree_are_red_and_indented_rows_grey():
    part = PagePart(rows=[["", "x"], ["ours", "1"], ["  paper", "+1.00% !"]])
    text = Report("", [part], None).page
    assert '<td class="wrong">+1.00% !</td>' in text
    assert text.count('class="muted"') == 1


def test_a_terminal_shows_neither_pictures_nor_what_is_aside():
    parts = [PagePart("one", lines=["a", "b"], pictures=["<svg/>"]), PagePart("two", aside=True)]
    assert Report("title", [*parts, PagePart(lines=["c"])], None).text == "one\n\na\nb\n\nc"


@pytest.mark.parametrize(
    ("points", "logarithmic"),
    [([(0.0, 0.0), (1.0, 1.0)], False), ([(1.0, 10.0), (100.0, 1000.0)], True)],
)
def test_points_go_right_and_up(points, logarithmic):
    text = chart("<b>", "x", "y", [Series("s", points)], logarithmic=logarithmic)
    assert 'points="76.0,386.0 700.0,58.0"' in text
    assert "&lt;b&gt;" in text
