"""Charts are well-formed and put things where they belong."""

import pytest

from jaxserve.planner.svg import Series, chart


@pytest.mark.parametrize(
    ("points", "logarithmic"),
    [([(0.0, 0.0), (1.0, 1.0)], False), ([(1.0, 10.0), (100.0, 1000.0)], True)],
)
def test_points_go_right_and_up(points, logarithmic):
    text = chart("t", "x", "y", [Series("s", points)], logarithmic=logarithmic)
    assert 'points="76.0,386.0 700.0,58.0"' in text


def test_labels_are_escaped():
    assert "&lt;b&gt;" in chart("<b>", "x", "y", [Series("s", [(1.0, 1.0)])])
