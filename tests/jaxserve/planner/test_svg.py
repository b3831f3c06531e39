"""Charts are well-formed and put things where they belong."""

import xml.etree.ElementTree as ElementTree

import pytest

from jaxserve.planner.figures import draw
from jaxserve.planner.svg import Series, bars, chart
from jaxserve.planner.tables import figures, load_sources


@pytest.fixture(scope="module")
def drawn() -> dict[str, str]:
    return draw({table.name: table for table in figures(load_sources())})


def test_the_papers_five_figures_are_well_formed(drawn):
    parts = ("1", "2-8k", "2-32k", "3a", "3b", "4", "5")
    assert list(drawn) == [f"figure-{part}.svg" for part in parts]
    for text in drawn.values():
        assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
        assert "nan" not in text


@pytest.mark.parametrize(
    ("points", "logarithmic"),
    [([(0.0, 0.0), (1.0, 1.0)], False), ([(1.0, 10.0), (100.0, 1000.0)], True)],
)
def test_points_go_right_and_up(points, logarithmic):
    text = chart("t", "x", "y", [Series("s", points)], logarithmic=logarithmic)
    assert 'points="76.0,386.0 700.0,58.0"' in text


def test_bars_of_nothing_are_not_drawn():
    text = bars("t", "y", ["a", "b"], [("one", [1.0, 0.0])])
    assert text.count("<rect") == 3  # background, legend, one bar


def test_labels_are_escaped():
    assert "&lt;b&gt;" in chart("<b>", "x", "y", [Series("s", [(1.0, 1.0)])])
