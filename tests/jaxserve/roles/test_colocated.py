"""The order in which whole steps are enqueued."""

from tests.jaxserve.roles.test_cell import plan


class TestColocated:
    def test_finishes_what_waited_longest(self, colocated_runtime):
        driver = colocated_runtime.driver
        driver.begin(plan(colocated_runtime, 1, 4))
        driver.begin(plan(colocated_runtime, 0, 5))
        assert driver.active
        assert driver.idle_lanes == []
        assert driver.advance().plan.number == 4
        assert driver.position() == ("step", 1, 0, 4)
        assert driver.idle_lanes == [1]
        assert driver.advance().plan.number == 5
        assert not driver.active
