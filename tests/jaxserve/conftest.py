"""Models and warm runtimes that several test files of a worker share."""

import signal
from collections.abc import Iterator

import pytest

from jaxserve.engine.runtime import Runtime, warm_up
from jaxserve.fleet.assembly import build_runtime
from tests.conftest import compile_unoptimised
from tests.jaxserve import layouts


@pytest.fixture
def signals() -> Iterator[None]:
    """Restores the handlers of signals."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """The folder of the model of `layouts.py`."""
    return layouts.write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def colocated_runtime(tiny_model) -> Runtime:
    """Two lanes on one device. Tests leave it idle (`layouts.serving`)."""
    return _warm(tiny_model, {**layouts.COLOCATED, "lanes": 2})


@pytest.fixture(scope="session")
def afd_runtime(tiny_model) -> Runtime:
    """1A1F with two lanes. Tests leave it idle (`layouts.serving`)."""
    return _warm(tiny_model, {"lanes": 2})


@pytest.fixture(scope="session")
def step_runtime(tiny_model) -> Runtime:
    """The same with `pipeline: step`: one program of both roles."""
    return _warm(tiny_model, {"lanes": 2, "pipeline": "step"})


@pytest.fixture(scope="session")
def reference(tiny_model, colocated_runtime) -> layouts.Reference:
    """Greedy tokens of the colocated run for all prompts, with their margins."""
    with layouts.serving(colocated_runtime) as engine:
        tokens = layouts.generate(engine)
    return layouts.Reference.of(tiny_model, tokens)


def _warm(model, overrides) -> Runtime:
    """Compiles unoptimised, whichever test is the first to ask: all workers share the programs."""
    before = compile_unoptimised(True)
    runtime = build_runtime(layouts.deployment(model, overrides))
    warm_up(runtime)
    compile_unoptimised(before)
    return runtime
