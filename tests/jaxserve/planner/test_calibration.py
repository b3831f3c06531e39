import numpy as np
import pytest

from jaxserve.planner.calibration import NOTHING, SPREAD, Calibration, Fit, fit


def test_a_line_through_points_on_a_line():
    found = fit([(1.0, 5.0), (2.0, 7.0), (10.0, 23.0)])
    assert found.constant == pytest.approx(3.0)
    assert found.scale == pytest.approx(2.0)
    assert (found.points, found.error) == (3, pytest.approx(0.0, abs=1e-9))


def test_one_point_is_a_factor():
    assert fit([(2.0, 3.0)])[:3] == (0.0, pytest.approx(1.5), 1)


def test_points_too_close_together_say_nothing_of_a_constant():
    found = fit([(1.0, 2.0), (SPREAD * 0.99, 4.0)])
    assert found.constant == 0.0
    assert found.error > 0.1


@pytest.mark.parametrize("points", [[(1.0, 1.0), (10.0, 100.0)], [(1.0, 10.0), (10.0, 1.0)]])
def test_a_line_that_starts_below_0_or_falls_is_replaced(points):
    found = fit(points)
    assert found.constant == 0.0
    assert found.scale > 0


def test_relative_errors_are_weighed_alike():
    """The same relative scatter at both ends, so that small times are not ignored."""
    found = fit([(1.0, 1.1), (1.0, 0.9), (100.0, 110.0), (100.0, 90.0)])
    assert found.constant == pytest.approx(0.0, abs=0.05)
    assert found.error == pytest.approx(0.1, abs=0.03)


@pytest.mark.parametrize("points", [[], [(0.0, 1.0)], [(1.0, -1.0)]])
def test_no_such_points(points):
    with pytest.raises(ValueError, match="must be above 0"):
        fit(points)


def test_correction():
    found = Calibration({("ffn", "A"): Fit(1.0, 2.0, 2, 0.0)})
    assert found.correct("ffn", "A", 5.0) == 11.0
    assert found.correct("attend", "A", 5.0) == 5.0
    assert found.correct("ffn", "B", 5.0) == 5.0
    assert NOTHING.correct("ffn", "A", 5.0) == 5.0
    assert list(found.correct("ffn", "A", np.array([1.0, 2.0]))) == [3.0, 5.0]
