import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.observe import compilation
from jaxserve.observe.compilation import CompilationCounter


@pytest.fixture
def counter():
    counter = CompilationCounter()
    yield counter
    counter.stop()


def compile_something_new(value: float) -> None:
    """A lambda is a program of its own, every time."""
    jax.jit(lambda x: x * jnp.float32(value))(np.float32(1))


def test_counts_and_warns(counter, caplog):
    compile_something_new(0.5)
    assert counter.count == 1
    assert "compiled jit(<lambda>) in 0." in caplog.text
    assert "after the engine was ready (1 so far)" in caplog.text
    compile_something_new(0.25)
    assert counter.count == 2


def test_a_warm_program_is_free(counter):
    function = jax.jit(lambda x: x + jnp.float32(3))
    function(np.float32(1))
    before = counter.count
    for _ in range(5):
        function(np.float32(2))
    executable = function.lower(jax.ShapeDtypeStruct((2,), np.float32)).compile()
    assert counter.count == before + 1
    executable(np.ones(2, np.float32))
    assert counter.count == before + 1
    function(np.ones(3, np.float32))  # another shape
    assert counter.count == before + 2


def test_on_any_thread_or_only_on_its_own(counter):
    thread = threading.Thread(target=compile_something_new, args=(0.0625,))
    own = CompilationCounter(thread)
    compile_something_new(6.5)
    assert (counter.count, own.count) == (1, 0)
    thread.start()
    thread.join()
    assert (counter.count, own.count) == (2, 1)
    own.stop()


def test_only_between_its_making_and_its_end(counter):
    compile_something_new(1.5)
    other = CompilationCounter()
    compile_something_new(2.5)
    other.stop()
    compile_something_new(3.5)
    assert (counter.count, other.count) == (3, 1)


def test_other_events_are_not_counted(counter):
    jax.monitoring.record_event_duration_secs("/jax/core/compile/jaxpr_trace_duration", 1.0)
    assert counter.count == 0
    jax.monitoring.record_event_duration_secs(compilation.COMPILED, 1.0)
    assert counter.count == 1
