"""A probe on a driver of plain objects: what is measured while it is on, and nothing when off."""

import jax.numpy as jnp
import pytest

from jaxserve.observe.probe import Probe


class Driver:
    def __init__(self, observer=None):
        self.observer = observer

    def step(self, number: int) -> None:
        """A stage, observed by whoever observes."""
        if self.observer is not None:
            self.observer.observe("step", 0, 0, number, jnp.zeros(()))


class Notes:
    def __init__(self):
        self.steps = []

    def observe(self, stage, lane, layer, step, result, *told):
        self.steps.append(step)


@pytest.fixture
def driver():
    return Driver()


@pytest.fixture
def probe(driver):
    probe = Probe(driver, process=3)
    yield probe
    probe.close()


def test_only_what_happens_while_it_is_on(driver, probe) -> None:
    driver.step(1)
    probe.turn(True)
    driver.step(2)
    driver.step(3)
    probe.turn(False)
    driver.step(4)
    assert driver.observer is None
    spans = probe.take(10.0)
    assert [(s.stage, s.step, s.process) for s in spans] == [("step", 2, 3), ("step", 3, 3)]


def test_the_next_time_begins_with_nothing(driver, probe) -> None:
    for number in (1, 2):
        probe.turn(True)
        driver.step(number)
        probe.turn(False)
        assert [span.step for span in probe.take(10.0)] == [number]


def test_who_observes_already_goes_on() -> None:
    driver = Driver(notes := Notes())
    probe = Probe(driver)
    driver.step(1)
    probe.turn(True)
    driver.step(2)
    probe.turn(False)
    driver.step(3)
    assert notes.steps == [1, 2, 3]
    assert [span.step for span in probe.take(10.0)] == [2]
    assert driver.observer is notes
    probe.close()
