import threading

import numpy as np
import pytest

from jaxserve.engine.stepper import ResultReader
from jaxserve.errors import EngineFailedError
from jaxserve.roles.layout import Bucket
from jaxserve.roles.sampling import Finished
from jaxserve.roles.written_steps import plan_of_rows
from tests.jaxserve.engine.fake_driver import FakeArray


@pytest.fixture
def reader():
    reader = ResultReader()
    yield reader
    reader.close()


def step(number, wait=lambda: None):
    array = FakeArray(np.asarray([[number, number + 1]], np.int32), wait)
    return Finished(plan_of_rows(0, number, Bucket(8, 1), [[]], slots=2), array, None, array)


def no_failure():
    return None


def test_in_the_order_of_the_steps(reader):
    slow = threading.Event()
    reader.read(step(4, lambda: slow.wait(20)))
    reader.read(step(5))
    assert not reader.ready()
    slow.set()
    taken = [reader.take(20, no_failure) for _ in range(2)]
    assert [(plan.number, result.sampled.tolist()) for plan, result in taken] == [
        (4, [[4, 5]]),
        (5, [[5, 6]]),
    ]
    assert not reader.ready()


def test_a_pause_of_the_process_is_not_the_steps_fault():
    """The clock jumps by a minute between two looks, as after a container was frozen."""
    ticks = [0.0]

    def clock():
        ticks[0] += 60.0
        return ticks[0]

    reader, gate = ResultReader(clock), threading.Event()
    reader.read(step(0, lambda: gate.wait(20)))
    threading.Timer(0.7, gate.set).start()
    plan, _ = reader.take(30, no_failure)
    assert plan.number == 0
    reader.close()


def test_an_error_of_the_computation_and_the_next_step(reader):
    def broken():
        raise RuntimeError("device lost")

    reader.read(step(3, broken))
    reader.read(step(4))
    with pytest.raises(EngineFailedError, match="step 3 of lane 0: device lost"):
        reader.take(20, no_failure)
    assert reader.take(20, no_failure)[0].number == 4


def test_its_thread_ends():
    before = set(threading.enumerate())
    reader = ResultReader()
    (thread,) = set(threading.enumerate()) - before
    gate = threading.Event()
    reader.read(step(0, lambda: gate.wait(20)))
    threading.Timer(0.2, gate.set).start()
    reader.close()
    assert not thread.is_alive(), "closing waits for the read under way"
