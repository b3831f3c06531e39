import numpy as np
import pytest

from jaxserve.planner.comparison import Compared, step_seconds, summary
from jaxserve.planner.stage_times import StepTimes
from jaxserve.roles.layout import StepLoad
from tests import golden


def times(enter: float = 3.0, host: float = 0.0) -> StepTimes:
    """Three layers."""
    attend = [np.array([seconds]) for seconds in (enter, 1.0, 1.0)]
    return StepTimes(attend, [0.5] * 3, [2.0, 1.0, 1.0], [0.25] * 3, 4.0, host)


def test_a_step_of_one_lane_is_the_sum_of_its_stages():
    assert step_seconds(times(), 1, 1) == pytest.approx(3 + 2 * 1 + 3 * 0.75 + 4 + 4)


def test_lanes_hide_each_other_s_stages_and_the_first_attend_is_charged_to_each():
    one = step_seconds(times(), 1, 1)
    three = step_seconds(times(), 3, 1)
    busy = 3 + 2 + 4  # of attention, a lane
    assert 3 * busy <= three < 3 * one
    assert step_seconds(times(enter=4.0), 3, 1) == pytest.approx(three + 3)


@pytest.mark.parametrize(("host", "seconds"), [(0.0, 15.25), (10.0, 15.25), (20.0, 20.0)])
def test_the_host_enqueues_a_step_while_devices_run_the_one_before(host, seconds):
    assert step_seconds(times(host=host), 1, 1) == pytest.approx(seconds)


def test_the_lanes_share_the_host():
    assert step_seconds(times(host=20.0), 2, 1) == pytest.approx(40.0)


def test_what_was_held_out_is_counted_by_itself():
    load = StepLoad(8, 8, 8, 8, 800, 800)
    other = StepLoad(16, 8, 16, 16, 1600, 1600)
    found = [
        Compared("ffn", 0, load, 9, 1.0, 1.14, False),
        Compared("ffn", 0, other, 9, 1.0, 0.84, True),
        Compared("step", 0, other, 9, 1.0, 1.09, True),
    ]
    golden.check("planner/comparison.txt", "\n".join(summary(found)) + "\n")
