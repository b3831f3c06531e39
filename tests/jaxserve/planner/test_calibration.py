import itertools

import numpy as np
import pytest

from jaxserve.planner.calibration import NEAR, NOTHING, Calibration, Fit, FitKey, Terms, fit

KEY = FitKey("ffn", "A", "step3", "fp8", 1)
POINTS = [Terms(1.0, 4.0), Terms(2.0, 1.0), Terms(10.0, 3.0), Terms(4.0, 9.0)]


def of(constant, memory, compute, terms=POINTS):
    return [(one, constant + memory * one.memory + compute * one.compute) for one in terms]


@pytest.mark.parametrize("true", [(3.0, 2.0, 1.5), (0.0, 2.0, 1.0), (1.0, 0.0, 2.0), (2, 1, 0)])
def test_what_the_points_were_made_from(true):
    found = fit(of(*true))
    assert found[:3] == pytest.approx(true, abs=1e-9)
    assert (found.points, found.error) == (4, pytest.approx(0.0, abs=1e-9))
    assert found.determined
    assert found.seconds(Terms(7.0, 5.0)) == pytest.approx(true[0] + 7 * true[1] + 5 * true[2])


def test_another_sharding_reads_other_weights():
    """Half of the points' fixed bytes, at the factor of the others; never less than none."""
    found = fit([(one._replace(fixed=2.0), seconds) for one, seconds in of(3.0, 2.0, 1.5)])
    assert found.seconds(Terms(7.0, 5.0, 2.0)) == pytest.approx(3 + 14 + 7.5)
    assert found.seconds(Terms(7.0, 5.0, 1.0)) == pytest.approx(3 - 2 + 14 + 7.5)
    assert found.seconds(Terms(7.0, 5.0, 0.0)) == pytest.approx(14 + 7.5)


def test_nothing_is_below_0():
    """Where the best line would start below 0 or fall, the best of the others is taken."""
    points = [(Terms(1.0, 1.0), 1.0), (Terms(2.0, 5.0), 4.0), (Terms(3.0, 2.0), 9.0)]
    found = fit(points)
    assert min(found[:3]) >= 0
    grid = itertools.product(np.linspace(0, 3, 31), repeat=3)
    weights = [found.seconds(terms) for terms, _ in points]

    def error(constant, memory, compute):
        times = ((constant + memory * x + compute * y, s) for (x, y, _), s in points)
        far = [abs(t - s) / w for (t, s), w in zip(times, weights, strict=True)]
        return sum(one**2 / 2 if one < NEAR else NEAR * (one - NEAR / 2) for one in far)

    assert error(*found[:3]) <= 1.02 * min(error(*factors) for factors in grid)


def test_chance_does_not_make_a_fit_too_small():
    """The mean of what scatters, not what is nearest to the smallest."""
    found = fit([(Terms(0.0, 0.0), seconds) for seconds in (1.6, 2.0, 2.4)])
    assert found.constant == pytest.approx(2.0)
    scattered = [(Terms(x, 0.0), x * factor) for x in (1.0, 10.0) for factor in (0.8, 1.2)]
    assert fit(scattered).memory == pytest.approx(1.0, abs=1e-3)


def test_one_load_that_something_else_delayed_changes_little():
    times = of(3.0, 2.0, 1.5, [*POINTS, Terms(6.0, 2.0), Terms(3.0, 7.0), Terms(8.0, 8.0)])
    times[2] = times[2][0], 4 * times[2][1]
    found = fit(times)
    others = [(found.seconds(terms), seconds) for terms, seconds in times if terms != times[2][0]]
    assert [one for one, _ in others] == pytest.approx([one for _, one in others], rel=0.15)
    assert found.error == pytest.approx(0.75, abs=0.05)  # and says so


@pytest.mark.parametrize(
    ("terms", "determined"),
    [
        ([Terms(1.0, 2.0)], False),
        ([Terms(1.0, 2.0), Terms(2.0, 4.0), Terms(3.0, 6.0)], False),  # one is twice the other
        ([Terms(1.0, 0.0), Terms(2.0, 0.0)], True),  # a message has no FLOPs
        (POINTS, True),
    ],
)
def test_whether_the_terms_can_be_told_apart(terms, determined):
    found = fit(of(1.0, 2.0, 3.0, terms))
    assert found.determined == determined
    assert found.error == pytest.approx(0.0, abs=1e-6)


def test_no_such_points():
    for points in ([], [(POINTS[0], 0.0)], [(POINTS[0], -1.0)], [(Terms(-1.0, 1.0), 1.0)]):
        with pytest.raises(ValueError, match="must be above 0"):
            fit(points)


def test_a_fit_is_for_a_stage_of_a_model_on_hardware_in_a_format():
    found = Calibration({KEY: Fit(1.0, 2.0, 3.0, 3, 0.0, True)})
    terms, roof = Terms(5.0, 7.0), 4.0
    assert found.seconds(KEY, terms, roof) == 32.0
    assert found.seconds(KEY._replace(layers=0), terms, roof) == 32.0  # other layers of the model
    for other in ({"stage": "attend"}, {"hardware": "B"}, {"format": "int8"}, {"model": "qwen3"}):
        assert found.seconds(KEY._replace(**other), terms, roof) == roof
    assert NOTHING.seconds(KEY, terms, roof) == roof
    attend = Calibration({KEY._replace(stage="attend"): Fit(1.0, 2.0, 3.0, 3, 0.0, True)})
    assert attend.seconds(KEY._replace(stage="enter"), terms, roof) == 32.0  # as other layers'
    assert attend.seconds(KEY._replace(stage="leave"), terms, roof) == roof
    several = Terms(np.array([1.0, 2.0]), np.array([0.0, 1.0]))
    assert found.seconds(KEY, several, roof).tolist() == [3.0, 8.0]
